#pragma once

namespace kvq {

/// From now on, all that the program prints to `stdout` and `stderr` passes a TextFilter (core/text.h), so that no
/// control character of any file reaches a terminal or a log, whoever prints it. Colors pass if the stream is a
/// terminal. What `stderr` does not take (closed, full disk) is dropped, because there is no place left to say so;
/// `stdout` reports the error as before. Calling it again does nothing.
void make_output_safe();

/// Prints what the filters hold back at the end of the output.
void finish_output();

}  // namespace kvq
