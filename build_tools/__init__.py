"""What setup.py and the Makefile run: finding tools, planning a build, compiling, checking."""
