"""A vision-language model as a judge: what it is asked, what its answers mean, what it may cost."""
