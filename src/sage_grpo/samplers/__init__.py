"""Samplers: schedules, kernels, transitions, solvers and windows."""
