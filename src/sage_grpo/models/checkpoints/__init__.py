"""Files of models: read, checked, cached and written."""
