"""Configurations as the frameworks write them, and read from their files."""
