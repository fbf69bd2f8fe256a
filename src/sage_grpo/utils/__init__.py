"""Shared helpers that know nothing of training: files, text, video, statistics, servers, imports."""
