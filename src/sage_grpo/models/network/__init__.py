"""What families share inside their networks and VAEs."""
