"""The host fabric: this machine's CPU.

host_fabric   runs programs: found compiled, compiled now or in the background, or one by one
library       which operations torch has a kernel for here: the kernel library
denormals     numbers next to zero, as zero
"""
