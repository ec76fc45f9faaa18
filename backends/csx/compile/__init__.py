"""From a graph to a callable.

``program`` and ``plugins`` import from here, and no other room; this one imports ``diagnostics``,
``graph`` and the options of the backend alone.

fabric           what runs programs: what every fabric does
host_fabric      the host's CPU; fabrics: which there are, and which one a backend asks for;
                 toolchain: what the machine has for compiling
steps            a compiled program as data: what it allocates, frees and calls, in order
static_memory    small intermediates of one, allocated once; alive: what it holds, call by call
inductor         torch's compiler: from a graph to steps and kernels; wrapper: its scheduling and
                 its lines, as steps; lowerings: what our own operations are to it; indices: their
                 strides, sooner; compiler_patches: what is changed around it
fused            regions that are one kernel each
library          the table of the kernel library
parts            a large graph cut where it comes again; line: its operations in a line; repeats:
                 what comes again in it; linking: the parts' code, as one
made             what runs a graph: its kernels, and which operations each computes
program          a compiled program as files; kept: what earlier ones left that it can use
translation_unit kernels as C++ source; kernel_modules: as machine code, by the C++ compiler;
                 headers: torch's, as that has read it
processes        the C++ compiler's; vector_units: what it can make for the processor
parallel_checks  indices that are checked in loops of several threads
background       compiling beside the training, in a worker process; worker_pulse: whether that
                 still works; meanwhile: what runs until then, and whether it can become faster;
                 reference: the operations, one by one; later: what takes their place; together:
                 in all processes at once
compilation      a graph and its compiled code in the cache
cache            compiled programs in a folder; fingerprint: the key of each
entries          one of them, sealed; cache_folder: where they lie; upkeep: their names and locks,
                 and which of them are removed
compiler_log     a compiler that failed: a line for the screen, and a file with the rest
failures         a step that fails while it runs: whose line, and why
selfcheck        runs of a compiled graph beside the same graph run operation by operation;
                 differences: what is compared; sensitivity: how far rounding moves a graph's
                 results; trust: what runs the graph meanwhile, and then; narrowing: which of
                 its kernels are wrong
denormals        numbers next to zero, as zero; threads: how many compute a program;
                 idle_threads: how they wait
"""
