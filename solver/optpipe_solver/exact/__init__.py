"""Proofs for small problems and tight memory."""
