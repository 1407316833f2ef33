// kvq-calibrate-mpi: kvq-calibrate by several processes, mpirun -n N kvq-calibrate-mpi FLAGS. Rank 0 is kvq-calibrate;
// where that would collect, it tells the others the folder of the parts, and all collect together. The others have the
// same flags and decide nothing.
#include "calibrate/device.h"
#include "calibrate/program.h"
#include "calibrate_mpi/collect.h"
#include "common/cli.h"
#include "common/describe.h"

#include <kvq/compute/parallel.h>
#include <kvq/core/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <thread>

namespace kvq {

namespace {

constexpr const char* kTool = "kvq-calibrate-mpi";

ToolText mpi_text() {
  ToolText text = calibrate_text();
  text.name = kTool;
  text.summary = "kvq-calibrate by several processes, on one machine or many";
  text.description =
      "Run it by mpirun or srun. Each process collects some layers; with more processes than layers, several collect "
      "one "
      "layer, each some of its KV heads. The first process then decides. The artifact has the bytes that kvq-calibrate "
      "writes. The dump and the folder of the output must be on a disk that all machines share.";
  text.examples = {{"mpirun -n 4 kvq-calibrate-mpi dump.h5", "4 processes"},
                   {"srun -n 36 kvq-calibrate-mpi dump.h5 --resume", "tasks of Slurm"}};
  return text;
}

/// Without --threads, the processes of a machine share its cores.
void share_cores(CalibrateFlags& flags, const Channel& channel) {
  if (flags.behavior.threads != 0) return;
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  flags.behavior.threads = std::max(1, cores / channel.ranks_here());
}

/// Processes divide the processors of machines; one process serves all GPUs of a machine.
void only_processors(CalibrateFlags& flags) {
  if (parse_device(flags.behavior.device).kind == DeviceChoice::Kind::cuda)
    throw Error{ErrorKind::usage, fmt::format("--device {}: {} computes on processors", flags.behavior.device, kTool),
                "kvq-calibrate takes all GPUs of a machine; examples/batch divides layers over machines"};
  flags.behavior.device = "cpu";
}

void describe_flags(CLI::App& app, CalibrateFlags& flags) {
  describe(app, mpi_text());
  add_flags(app, flags);
}

int run_first(const Channel& channel, int argc, char** argv) {
  bool has_called = false, is_collecting = false;
  CLI::App app;
  CalibrateFlags flags;
  describe_flags(app, flags);
  const int code = run_tool(kTool, app, argc, argv, [&] {
    share_cores(flags, channel);
    only_processors(flags);
    return calibrate(flags, [&](const Dump& dump, const CollectRequest& request, const PartsFolder& parts, bool resume,
                                bool quiet, Backend&) {
      has_called = is_collecting = true;
      channel.broadcast(parts.path().string());
      StatsOrigin origin = collect_in_groups(channel, dump, request, parts, resume, quiet);
      is_collecting = false;
      return origin;
    });
  });
  if (!has_called) channel.broadcast("");  // nothing to collect: help, an error, statistics
  if (is_collecting) channel.abort(code);
  return code;
}

int run_other(const Channel& channel, int argc, char** argv) {
  const std::string folder = channel.broadcast("");
  if (folder.empty()) return 0;
  CLI::App app;
  CalibrateFlags flags;
  describe_flags(app, flags);
  const int code = run_tool(kTool, app, argc, argv, [&] {
    try {
      share_cores(flags, channel);
      const ThreadLimit limit(flags.behavior.threads);
      const Dump dump = open_dump(flags.inputs);
      const CollectRequest request = checked_request(flags, resolve_options(flags), dump);
      collect_in_groups(channel, dump, request, PartsFolder(folder), flags.behavior.resume, true);
      return 0;
    } catch (const Error& error) {
      throw Error{error.kind(), fmt::format("process {}: {}", channel.rank(), error.what()), error.hint()};
    }
  });
  if (code != 0) channel.abort(code);
  return 0;
}

}  // namespace

}  // namespace kvq

int main(int argc, char** argv) {
  const kvq::Channel channel(&argc, &argv);
  return channel.rank() == 0 ? kvq::run_first(channel, argc, argv) : kvq::run_other(channel, argc, argv);
}
