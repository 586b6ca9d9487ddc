"""The code inside the sandbox: uses the standard library only; sandbox.py starts it in a Python without site-packages.

launcher.py supervises. program.py runs the untrusted code and checker.py its tests, in separate processes that talk
through peer.py. namespaces.py, restrictions.py and syscalls.py take rights away.
"""
