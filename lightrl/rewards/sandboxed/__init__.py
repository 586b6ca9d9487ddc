"""What runs inside the sandbox: standard library only, started by sandbox.py in a Python without site-packages.

launcher.py supervises; program.py runs the untrusted code and checker.py its tests, each in a process of its own, which
talk through peer.py. namespaces.py, restrictions.py and syscalls.py take rights away.
"""
