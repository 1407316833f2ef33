#include "bench/sdpa.h"

#include <kvq/core/error.h>

#include <fmt/format.h>
#include <script_text.h>

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

extern char** environ;

namespace kvq::bench {

namespace {

/// Runs a program and returns its standard output; the program inherits standard error.
std::string output_of(const std::vector<std::string>& command) {
  int ends[2];
  if (pipe(ends) != 0) throw Error{ErrorKind::io, fmt::format("pipe: {}", std::strerror(errno))};
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_addclose(&actions, ends[0]);
  posix_spawn_file_actions_addclose(&actions, ends[1]);
  std::vector<char*> arguments;
  arguments.reserve(command.size() + 1);
  for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  pid_t child = 0;
  const int refused = posix_spawnp(&child, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  std::string text;
  char buffer[4096];
  if (refused == 0)
    for (ssize_t n = 0; (n = read(ends[0], buffer, sizeof buffer)) > 0;)
      text.append(buffer, static_cast<std::size_t>(n));
  close(ends[0]);
  if (refused != 0)
    throw Error{ErrorKind::unsupported, fmt::format("--sdpa: cannot run {}: {}", command[0], std::strerror(refused))};
  int status = 0;
  waitpid(child, &status, 0);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
    throw Error{ErrorKind::unsupported,
                fmt::format("--sdpa: {} could not measure: {}", command[0],
                            WIFEXITED(status) ? fmt::format("exit code {}", WEXITSTATUS(status))
                                              : fmt::format("signal {}", WTERMSIG(status))),
                "it needs PyTorch with CUDA; leave --sdpa out to compare with kvq's own bfloat16 kernel alone"};
  return text;
}

Json shape_json(const SdpaShape& s) {
  return {{"batch", s.batch},         {"context", s.context},       {"q_len", s.q_len},
          {"q_heads", s.num_q_heads}, {"kv_heads", s.num_kv_heads}, {"head_dim", s.head_dim}};
}

}  // namespace

Sdpa::Sdpa(const std::string& python, const std::vector<SdpaShape>& shapes) {
  Json list = Json::array();
  for (const SdpaShape& shape : shapes) list.push_back(shape_json(shape));
  document_ = parse_json(output_of({python, "-c", kSdpaScript, canonical_json(list)}), "--sdpa");
}

std::optional<Timing> Sdpa::find(const SdpaShape& shape) const {
  if (document_.is_null()) return std::nullopt;
  const Json wanted = shape_json(shape);
  for (const Json& row : document_.at("rows")) {
    const bool same = std::all_of(wanted.items().begin(), wanted.items().end(),
                                  [&](const auto& field) { return row.at(field.key()) == field.value(); });
    if (same && row.contains("median_us")) return Timing{row.at("median_us"), row.at("min_us"), row.at("max_us"), 0, 0};
  }
  return std::nullopt;
}

}  // namespace kvq::bench
