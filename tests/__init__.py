"""Tests mirror the packages; data/ holds published tables and golden schedules."""
