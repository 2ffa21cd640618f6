"""What is looked for in data, models and their outputs: values and habits, where `security` is
about code. Each finding is a `runner.findings.Reason`.
"""
