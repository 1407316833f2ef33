#pragma once

namespace kvq::blas {

/// Makes OpenBLAS map its buffers now, one for each of `threads` threads. OpenBLAS maps a buffer in a thread's first
/// product, and when the system refuses, OpenBLAS tries again for ever. Does nothing unless the process has a limit of
/// its address space (ulimit -v).
/// @throws Error{io} if the limit leaves no room for the buffers
void reserve_buffers(int threads);

}  // namespace kvq::blas
