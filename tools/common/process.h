#pragma once

/// What a tool's process does about signals, descriptors and memory, before anything else.
namespace kvq {

/// Prepares the process of a tool:
/// - SIGINT, SIGTERM and SIGHUP remove all temporaries, print a line and end the process with code 130. A signal that
///   the parent process ignores stays ignored, as under nohup.
/// - Standard streams that are closed become streams that take nothing, so that no output file gets their number.
/// - If the process has a limit of its address space (ulimit -v), the process starts again with
///   OPENBLAS_NUM_THREADS=1, because OpenBLAS's own threads, which kvq never uses, would take most of the limit or wait
///   for memory for ever.
/// - A pipe without a reader and a file that is too large are errors of write(), not signals.
/// @param tool  program name, for the message of an interruption; a literal
/// @param argv  of main()
void prepare_process(const char* tool, char** argv);

/// What the message of an interruption says after "interrupted". @param advice  a literal; empty: nothing
void set_interruption_advice(const char* advice);

}  // namespace kvq
