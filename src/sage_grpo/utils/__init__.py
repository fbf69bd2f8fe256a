"""Shared helpers without knowledge of training: files, text, video, statistics, servers, imports."""
