"""A vision-language model as a judge: its questions, answers and cost."""
