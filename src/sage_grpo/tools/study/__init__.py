"""A blind pairwise study in the browser: which of two videos of the same prompt do people prefer?"""
