"""Checks a machine, or all machines of a launch, before a run: versions, devices, limits, folders, collectives.

packages.py, machine.py: what each process checks alone. ranks.py: what the ranks check together. report.py: the table.
"""
