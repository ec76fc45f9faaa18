"""Torch's compiler: from a graph to kernels in C++, and these as machine code.

No other room imports ``torch._inductor``, but for what ``backends/torch_compiler.py`` has of it.

generate          a graph compiled into a folder
wrapper           the compiler's scheduling and the lines of its wrapper, as steps
changes           what is changed around the compiler, and what our own operations are to it
fused             regions that are one kernel each
earlier_code      what earlier compilations left; program: a compiled program as files
translation_unit  kernels as C++ source; kernel_modules: as machine code
headers           torch's, as the C++ compiler has read it; processes: that compiler's
toolchain         what the machine has for compiling, and which vector units it can compile for
"""
