"""Loggers for other libraries. Each library has its own module."""
