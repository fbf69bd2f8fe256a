"""Files of models: read, checked, cached, converted and written."""
