"""Kernels in C for a CPU, compiled where they run by the compiler that is there."""
