"""Checks of the values in data, models and outputs; findings are `runner.findings.Reason`s."""
