#include "bench/choose.h"
#include "bench/report.h"
#include "bench/rows.h"
#include "bench/targets.h"
#include "common/cli.h"
#include "common/config_file.h"
#include "common/describe.h"
#include "common/flag_facts.h"
#include "common/progress.h"
#include "common/side_format.h"
#include "common/text_output.h"

#include <kvq/core/error.h>

#include <fmt/format.h>

#include <map>

namespace kvq::bench {

namespace {

struct BenchFlags {
  std::string k, v, activation = "bf16", rule = "norm", rotation = "dense", python, output;
  int head_dim = 128, q_heads = 32, kv_heads = 8, page_size = 64, sinks = 64, recent = 256, device = 0;
  int prefix = 30720, chunk = 2048, new_tokens = 1;
  std::vector<int> batch = {1, 8, 32}, prefill_batch = {1, 8}, context = {32768},
                   tokens = {1, 32, 256, 1024, 8192, 32768}, hadamard = {1, 16, 32, 64, 128};
  bool dense = false, transform = false, windows = false, unchecked = false, append = false, generic = false;
  double clip = 1.0;
  int memory = 3, centroids = 256;
  std::optional<int> workspace_tokens;
  bool dry_run = false, explain = false, json = false, quiet = false;
  int multiprocessors = 132;
};

constexpr int kMostDecodeTokens = 256;  ///< more new tokens are a prompt

constexpr const char* kSides =
    "Formats of K and V in pages:\n"
    "  u2g128   affine codes, 2, 3 or 4 bits, groups of 32, 64, 128, ... channels\n"
    "  s2g128   symmetric codes; behind either b: bfloat16 scales, f: fp32;\n"
    "           before these, of u, z: integer zero points\n"
    "  w8n1     linear rows of 8 words and one scale (all verbs)\n"
    "  w12n1t3  codebook codes, 3 bits; w16n1t4: 4 bits (decode, write)\n"
    "  w12n3c   keys of mixed widths, codebook codes, 3 scales (decode, write)\n"
    "  bf16     exact rows (decode)\n"
    "Without --k and --v: every kernel that is built for these sizes\n"
    "(lib/kvq/runtime/variants.json).";

ToolText bench_text() {
  return {
      .name = "kvq-bench",
      .summary = "times GPU kernels beside what they compare with",
      .description =
          "Times kvq's GPU kernels beside what they compare with in the same run: a copy, a plain read of the same "
          "bytes, bfloat16 kernels. Results are held against the reference codec first. Times are medians over replays "
          "of a CUDA graph, in which calls take turns on sets of random data that together are larger than the L2 "
          "cache.",
      .examples = {{"kvq-bench decode --k u2g128 --batch 1,8,32", "INT2 attention"},
                   {"kvq-bench decode --batch 8 --sdpa python3", "all, PyTorch beside them"},
                   {"kvq-bench prefill --k u2g128 --sdpa python3", "2048 tokens over 30k"},
                   {"kvq-bench write --k u4g128 --tokens 8192", "fused rotation or not"},
                   {"kvq-bench targets --output bench.json", "targets and results"}},
      .sections = {{"Flags of a command", "kvq-bench COMMAND --help explains them."}},
      .words = {{"--page-size", {"16", "32", "64", "128"}},
                {"--activation", {"bf16", "fp16"}},
                {"--rotation", {"none", "hadamard", "dense", "scaled", "transform"}},
                {"--rule", {"absmax", "least_squares", "norm"}}},
  };
}

void add_shared(CLI::App& app, BenchFlags& f) {
  app.add_flag("--dry-run", f.dry_run, "only say what would be measured, and its bytes; needs no GPU");
  app.add_option("--device", f.device, "number of the CUDA device")
      ->check(whole_number(0, 1023))
      ->capture_default_str();
  app.add_flag("--json", f.json, "one JSON document on stdout (formats/bench.schema.json)");
  app.add_option("-o,--output", f.output, "also write that document to this file; - is --json")->type_name("FILE");
  app.add_flag("-q,--quiet", f.quiet, "no progress");
  add_config_flag(app)->group(kToolGroup);
}

void add_sizes(CLI::App& app, BenchFlags& f) {
  app.add_option("--k", f.k, "keys in pages, such as u2g128 [those of --v]")->type_name("FORMAT");
  app.add_option("--v", f.v, "values in pages [those of --k]")->type_name("FORMAT");
  app.add_option("--head-dim", f.head_dim, "channels of a head")->check(whole_number(1, 1024))->capture_default_str();
  app.add_option("--kv-heads", f.kv_heads, "key and value heads")->check(whole_number(1, 1024))->capture_default_str();
  app.add_option("--page-size", f.page_size, "tokens of a page")
      ->check(one_of({"16", "32", "64", "128"}))
      ->capture_default_str();
  app.add_option("--activation", f.activation, "type of queries, rows and results")
      ->check(one_of({"bf16", "fp16"}))
      ->type_name("NAME")
      ->capture_default_str();
}

void add_windows(CLI::App& app, BenchFlags& f) {
  app.add_option("--sinks", f.sinks, "first tokens that have exact rows")
      ->check(whole_number(0, 65536))
      ->capture_default_str();
  app.add_option("--recent", f.recent, "last tokens that have exact rows")
      ->check(whole_number(0, 65536))
      ->capture_default_str();
}

void add_unchecked(CLI::App& app, BenchFlags& f) {
  app.add_flag("--unchecked", f.unchecked, "each case also without checks of page and slot numbers");
}

/// Adds the flags of a cache and of its queries.
void add_cache(CLI::App& app, BenchFlags& f, std::vector<int>& batch) {
  app.footer(kSides);
  add_sizes(app, f);
  app.add_option("--q-heads", f.q_heads, "query heads")->check(whole_number(1, 4096))->capture_default_str();
  app.add_option("--batch", batch, "sequences; a list, such as 1,8,32")
      ->delimiter(',')
      ->type_name("LIST")
      ->check(whole_number(1, 65536))
      ->capture_default_str();
  add_windows(app, f);
  app.add_option("--rotation", f.rotation, "of what is cached")
      ->check(one_of({"none", "hadamard", "dense", "scaled", "transform"}))
      ->type_name("NAME")
      ->capture_default_str();
  app.add_option("--sdpa", f.python, "Python with PyTorch: also compare with its attention, cuDNN backend")
      ->type_name("FILE");
}

CLI::App* add_decode(CLI::App& app, BenchFlags& f) {
  CLI::App* decode = app.add_subcommand("decode", "attention of one new token a sequence over the paged cache");
  add_cache(*decode, f, f.batch);
  add_unchecked(*decode, f);
  decode->add_option("--context", f.context, "tokens of each sequence; a list")
      ->delimiter(',')
      ->type_name("LIST")
      ->check(whole_number(1, 1 << 24))
      ->capture_default_str();
  decode->add_option("--new-tokens", f.new_tokens, "each case also with so many new tokens of each sequence")
      ->check(whole_number(1, kMostNewTokens))
      ->capture_default_str();
  decode->add_flag("--generic", f.generic, "the generic kernels, which take all formats, instead of tuned ones");
  decode->add_option("--memory", f.memory, "of linear rows: codes that a value of their trellises looks back on")
      ->check(whole_number(1, 3))
      ->capture_default_str();
  decode->add_flag("--append", f.append, "each case also as a layer of a step: behind the write of its new tokens");
  auto* explain =
      decode->add_flag("--explain", f.explain, "only say how calls are scheduled on an assumed device; needs no GPU");
  decode->add_option("--multiprocessors", f.multiprocessors, "of the device that --explain assumes")
      ->needs(explain)
      ->check(whole_number(1, 1024))
      ->capture_default_str();
  add_shared(*decode, f);
  return decode;
}

CLI::App* add_prefill(CLI::App& app, BenchFlags& f) {
  CLI::App* prefill = app.add_subcommand("prefill", "attention of a chunk of new tokens over a packed prefix");
  add_cache(*prefill, f, f.prefill_batch);
  prefill->add_option("--prefix", f.prefix, "tokens of each sequence in the cache")
      ->check(whole_number(1, 1 << 24))
      ->capture_default_str();
  prefill->add_option("--chunk", f.chunk, "new tokens of each sequence")
      ->check(whole_number(1, 1 << 20))
      ->capture_default_str();
  add_shared(*prefill, f);
  return prefill;
}

CLI::App* add_write(CLI::App& app, BenchFlags& f) {
  CLI::App* write =
      app.add_subcommand("write", "rotate, quantize and write new tokens into pages, in one pass and in two");
  write->footer(kSides);
  add_sizes(*write, f);
  write->add_option("--tokens", f.tokens, "in one call; a list, such as 1,8192")
      ->delimiter(',')
      ->type_name("LIST")
      ->check(whole_number(1, 1 << 22))
      ->capture_default_str();
  write->add_option("--hadamard", f.hadamard, "orders of the rotation's blocks, 1 = none; a list")
      ->delimiter(',')
      ->type_name("LIST")
      ->check(whole_number(1, 1024))
      ->capture_default_str();
  write->add_flag("--dense", f.dense, "dense rotations, one for each KV head, in place of Hadamard ones");
  write->add_flag("--transform", f.transform,
                  "each case also with a transform: scales of channels, or a matrix that is not orthogonal");
  write->add_flag("--windows", f.windows,
                  "each case also with exact rows: up to 256 tokens as the last ones of as many sequences, more as one "
                  "prompt");
  add_windows(*write, f);
  add_unchecked(*write, f);
  write->add_option("--clip", f.clip, "clip ratio of affine codes, 1 = none")
      ->check(number_between(0.01, 1.0))
      ->capture_default_str();
  write->add_option("--rule", f.rule, "scales of symmetric codes")
      ->check(one_of({"absmax", "least_squares", "norm"}))
      ->type_name("NAME")
      ->capture_default_str();
  write
      ->add_option("--memory", f.memory,
                   "of linear rows: codes that a value of their trellises looks back on; 0: w8n1 has a codebook")
      ->check(whole_number(0, 3))
      ->capture_default_str();
  write
      ->add_option("--workspace-tokens", f.workspace_tokens,
                   "of linear rows: tokens that the workspace of a write has room for, 0 = no workspace [all]")
      ->check(whole_number(0, 1 << 24));
  write->add_option("--centroids", f.centroids, "of rows with an index (i1, i2): centroids of a KV head")
      ->check(whole_number(2, 65536))
      ->capture_default_str();
  add_shared(*write, f);
  return write;
}

CLI::App* add_targets(CLI::App& app, BenchFlags& f) {
  CLI::App* targets =
      app.add_subcommand("targets", "what the runtime is asked to reach on one H200, beside what it reaches");
  targets->add_option("--sdpa", f.python, "Python with PyTorch: also compare with its attention, cuDNN backend")
      ->type_name("FILE");
  add_shared(*targets, f);
  return targets;
}

/// A side that is not given is as the other side. parse_side() checks both, so that an error names the flag that was
/// given.
std::pair<std::string, std::string> sides(const BenchFlags& f) {
  if (!f.k.empty()) parse_side(f.k, f.head_dim, "--k");
  if (!f.v.empty()) parse_side(f.v, f.head_dim, "--v");
  return {f.k.empty() ? f.v : f.k, f.v.empty() ? f.k : f.v};
}

int heads_of_a_kv_head(const BenchFlags& f) {
  if (f.q_heads % f.kv_heads != 0)
    throw Error{ErrorKind::usage,
                fmt::format("--q-heads {} is not a multiple of --kv-heads {}", f.q_heads, f.kv_heads)};
  return f.q_heads / f.kv_heads;
}

CaseRotation rotation_of(const BenchFlags& f) {
  for (const CaseRotation rotation :
       {CaseRotation::none, CaseRotation::dense, CaseRotation::scaled, CaseRotation::transform})
    if (f.rotation == to_string(rotation)) return rotation;
  return CaseRotation::hadamard;
}

Windows windows_of(const BenchFlags& f) { return {.sink_tokens = f.sinks, .recent_tokens = f.recent}; }

Run prefill_cases(const BenchFlags& f) {
  heads_of_a_kv_head(f);
  const bool bf16 = f.activation == "bf16";
  const auto [k, v] = sides(f);
  std::vector<const DequantizeVariant*> variants = all_prefill(f.head_dim, bf16);
  if (!k.empty()) variants = {&choose_prefill(k, v, f.head_dim, bf16)};
  Run run;
  for (const DequantizeVariant* rows : variants)
    for (const int batch : f.prefill_batch) {
      const bool exact = rows->k.exact();
      run.prefill.push_back({{
                                 .rows = rows,
                                 .attention = find_prefill_variant(*rows),
                                 .num_q_heads = f.q_heads,
                                 .num_kv_heads = f.kv_heads,
                                 .batch = batch,
                                 .prefix = f.prefix,
                                 .chunk = f.chunk,
                                 .page_size = f.page_size,
                                 .exact = exact ? Windows{} : windows_of(f),
                                 .rotation = exact ? CaseRotation::none : rotation_of(f),
                             },
                             {},
                             {}});
    }
  return run;
}

Run decode_cases(const BenchFlags& f) {
  const int heads = heads_of_a_kv_head(f);
  const bool bf16 = f.activation == "bf16";
  const auto [k, v] = sides(f);
  std::vector<const DecodeVariant*> variants = all_decode(f.head_dim, heads, bf16);
  if (f.generic && (k.empty() || f.explain))
    throw Error{ErrorKind::usage, "--generic: expected --k or --v, and no --explain"};
  if (!k.empty())
    variants = {f.generic ? &choose_generic_decode(k, v, f.head_dim, heads, bf16)
                          : &choose_decode(k, v, f.head_dim, heads, bf16)};
  Run run;
  const auto new_tokens = f.new_tokens > 1 ? std::vector<int>{1, f.new_tokens} : std::vector<int>{1};
  for (const DecodeVariant* variant : variants)
    for (const int batch : f.batch)
      for (const int context : f.context)
        for (const int tokens : new_tokens) {
          // Exact pages need neither windows nor a rotation.
          const bool exact = variant->k.exact();
          run.decode.push_back({{
                                    .variant = variant,
                                    .num_q_heads = f.q_heads,
                                    .num_kv_heads = f.kv_heads,
                                    .batch = batch,
                                    .context = context,
                                    .new_tokens = tokens,
                                    .page_size = f.page_size,
                                    .exact = exact ? Windows{} : windows_of(f),
                                    .rotation = exact ? CaseRotation::none : rotation_of(f),
                                    .memory = f.memory,
                                    .unchecked = f.unchecked,
                                    .append = f.append && !exact,
                                },
                                {},
                                {},
                                {}});
          DecodeCase& c = run.decode.back().c;
          if (!f.generic) c.variant = find_decode_variant(c.key());
          if (context < tokens)
            throw Error{ErrorKind::usage, fmt::format("--new-tokens {}: more than --context {}", tokens, context)};
          if (f.explain) run.decode.back().explanation = explain(run.decode.back().c, f.multiprocessors);
        }
  return run;
}

Run write_cases(const BenchFlags& f) {
  const std::map<std::string, ScaleRule> rules = {
      {"absmax", ScaleRule::absmax}, {"least_squares", ScaleRule::least_squares}, {"norm", ScaleRule::norm}};
  for (const int order : f.hadamard)
    if ((order & (order - 1)) != 0 || f.head_dim % order != 0)
      throw Error{ErrorKind::usage,
                  fmt::format("--hadamard {}: expected powers of two that divide --head-dim {}", order, f.head_dim)};
  const bool bf16 = f.activation == "bf16";
  const auto [k, v] = sides(f);
  std::vector<const WriteVariant*> variants = all_write(f.head_dim, bf16);
  if (!k.empty()) variants = {&choose_write(k, v, f.head_dim, bf16, f.memory, rules.at(f.rule))};
  for (const WriteVariant* variant : variants)
    for (const TileSide* side : {&variant->k, &variant->v})
      if (side->index_bytes > 0 && (f.centroids <= 256) != (side->index_bytes == 1))
        throw Error{ErrorKind::usage,
                    fmt::format("--centroids {}: expected {} for {}", f.centroids,
                                side->index_bytes == 1 ? "at most 256" : "more than 256", side_name(*side, false))};
  Run run;
  const auto both = [](bool second) { return second ? std::vector<bool>{false, true} : std::vector<bool>{false}; };
  for (const WriteVariant* variant : variants)
    for (const int tokens : f.tokens)
      for (const int order : f.dense ? std::vector<int>{1} : f.hadamard)
        for (const bool transform : both(f.transform && variant->k.index_bytes == 0))  // not with centroids
          for (const bool windows : both(f.windows && windows_of(f) != Windows{}))
            run.write.push_back(
                {{
                     .variant = variant,
                     .num_kv_heads = f.kv_heads,
                     .tokens = tokens,
                     .page_size = f.page_size,
                     .order = order,
                     .dense = f.dense,
                     .transform = transform,
                     .clip_ratio = f.clip,
                     .symmetric_rule = rules.at(f.rule),
                     .memory = f.memory,
                     .centroids = f.centroids,
                     .workspace_tokens = f.workspace_tokens,
                     .step = windows && tokens <= kMostDecodeTokens ? WriteStep::decode : WriteStep::prompt,
                     .exact = windows ? windows_of(f) : Windows{},
                     .unchecked = f.unchecked,
                 },
                 {}});
  return run;
}

int bench(const BenchFlags& f, Run run, bool with_targets) {
  if (run.decode.empty() && run.write.empty() && run.prefill.empty())
    throw Error{ErrorKind::unsupported,
                fmt::format("no kernel is built for head_dim {} with {}", f.head_dim, f.activation),
                "lib/kvq/runtime/variants.json lists what is"};
  const auto claim = claim_text_output(f.output, "kvq-bench");
  if (!f.dry_run && !f.explain) {
    Progress progress(work_of(run), f.quiet || f.json);
    measure(f.device, f.python, run, [&](double done, const std::string& what) { progress.update(done, what); });
  }
  const std::vector<Target> targets = with_targets ? judge(run) : std::vector<Target>{};
  const std::string document = json_of(run, targets).dump(2) + "\n";
  const bool is_document = f.json || f.output == "-";
  if (!f.output.empty() && f.output != "-") write_text_output(f.output, document);
  if (is_document)
    fmt::print("{}", document);
  else
    fmt::print("{}{}", text_of(run), targets.empty() ? "" : "\n" + text_of(targets));
  return 0;
}

}  // namespace

}  // namespace kvq::bench

int main(int argc, char** argv) {
  using namespace kvq::bench;
  CLI::App app;
  kvq::describe(app, bench_text(), kvq::ConfigFlag::of_commands);
  app.require_subcommand(1);
  BenchFlags flags;
  const CLI::App* decode = add_decode(app, flags);
  const CLI::App* write = add_write(app, flags);
  const CLI::App* prefill = add_prefill(app, flags);
  const CLI::App* targets = add_targets(app, flags);
  return kvq::run_tool("kvq-bench", app, argc, argv, [&] {
    return bench(flags,
                 decode->parsed()    ? decode_cases(flags)
                 : write->parsed()   ? write_cases(flags)
                 : prefill->parsed() ? prefill_cases(flags)
                                     : target_cases(),
                 targets->parsed());
  });
}
