"""Parts of networks and VAEs that families share."""
