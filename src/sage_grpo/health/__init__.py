"""What watches a run for signs that it goes wrong, and what is done about them."""
