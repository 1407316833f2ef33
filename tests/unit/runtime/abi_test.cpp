#include <kvq/runtime/api/abi.h>
#include <kvq/runtime/api/handles.h>
#include <kvq/runtime.hpp>

#include "support/container_edit.h"

#include <catch2/catch.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

using namespace kvq;
using Catch::Matchers::Contains;

namespace {

/// A structure of this library that has grown by `b` and `c`, and the same structure of a newer header.
struct Known {
  std::size_t struct_size;
  std::int64_t a;
  std::int32_t b, c;
};
struct Newer {
  Known known;
  std::int64_t d;
};

}  // namespace

template <>
inline constexpr std::size_t abi::kFirstSize<Known> = offsetof(Known, b);

namespace {

/// The structure of a caller that was compiled with the first header: it ends where the library's grew, and what lies
/// behind it is not the caller's to give.
struct FirstCaller {
  std::size_t struct_size = offsetof(Known, b);
  std::int64_t a = 7;
  std::int64_t behind = 0x5A5A5A5A5A5A5A5A;
  Known* as_known() { return reinterpret_cast<Known*>(this); }
};

std::string source(const char* path) { return test::file_bytes(std::string(KVQ_SOURCE_DIR) + path); }

/// First group of each match, mapped to the second one (or to nothing).
std::map<std::string, std::string> matches(const std::string& text, const std::string& pattern) {
  std::map<std::string, std::string> found;
  const std::regex regex(pattern);
  for (std::sregex_iterator at(text.begin(), text.end(), regex), end; at != end; ++at)
    found[(*at)[1].str()] = at->size() > 2 ? (*at)[2].str() : "";
  return found;
}

}  // namespace

TEST_CASE("Structures of the interface have the sizes that callers were compiled with", "[runtime]") {
  // Changing a size breaks callers. Append fields instead, and keep these lines, which are the first sizes of ABI 300.
  const auto check = [](const char* name, std::size_t first, std::size_t frozen, std::size_t size) {
    INFO(name);
    CHECK(first == frozen);
    CHECK(size >= frozen);
  };
#define KVQ_CHECK_SIZE(type, bytes) check(#type, abi::kFirstSize<type>, bytes, sizeof(type))
  KVQ_CHECK_SIZE(kvq_error, 1032);
  KVQ_CHECK_SIZE(kvq_kernel_info, 24);
  KVQ_CHECK_SIZE(kvq_layer_serving, 328);
  KVQ_CHECK_SIZE(kvq_layer_geometry, 48);
  KVQ_CHECK_SIZE(kvq_model_options, 64);
  KVQ_CHECK_SIZE(kvq_model_info, 72);
  KVQ_CHECK_SIZE(kvq_layer_info, 144);
  KVQ_CHECK_SIZE(kvq_fold_values_args, 48);
  KVQ_CHECK_SIZE(kvq_fold_error, 40);
  KVQ_CHECK_SIZE(kvq_fold_keys_args, 48);
  KVQ_CHECK_SIZE(kvq_fold_key_scales_args, 64);
  KVQ_CHECK_SIZE(kvq_layer_pools, 40);
  KVQ_CHECK_SIZE(kvq_cache_options, 24);
  KVQ_CHECK_SIZE(kvq_sequences, 80);
  KVQ_CHECK_SIZE(kvq_step_args, 48);
  KVQ_CHECK_SIZE(kvq_fault, 32);
  KVQ_CHECK_SIZE(kvq_copy_args, 48);
  KVQ_CHECK_SIZE(kvq_plan_options, 40);
  KVQ_CHECK_SIZE(kvq_memory_options, 40);
  KVQ_CHECK_SIZE(kvq_memory, 120);
  KVQ_CHECK_SIZE(kvq_write_args, 64);
  KVQ_CHECK_SIZE(kvq_decode_args, 88);
  KVQ_CHECK_SIZE(kvq_append_args, 136);
  KVQ_CHECK_SIZE(kvq_prefill_args, 144);
  KVQ_CHECK_SIZE(kvq_merge_args, 88);
  KVQ_CHECK_SIZE(kvq_dequantize_args, 80);
  KVQ_CHECK_SIZE(kvq_selftest_layer, 320);
#undef KVQ_CHECK_SIZE
  CHECK(offsetof(kvq_model_info, content_hash) == 72);
  CHECK(offsetof(kvq_layer_info, ring_slot_bytes) == 104);
  CHECK(offsetof(kvq_layer_info, k_scales) == 136);
  CHECK(offsetof(kvq_sequences, sequence_ids) == 72);
  CHECK(offsetof(kvq_decode_args, workspace) == 72);
  CHECK(offsetof(kvq_decode_args, q_indptr) == 88);
  CHECK(offsetof(kvq_layer_info, logit_softcap) == 144);
  CHECK(offsetof(kvq_copy_args, sequence_ids) == 40);
  CHECK(offsetof(kvq_copy_args, group) == 48);
  CHECK(offsetof(kvq_layer_pools, group) == 40);
  CHECK(offsetof(kvq_memory_options, page_tokens) == 40);
}

TEST_CASE("Every structure that has a size has a first size", "[runtime]") {
  const std::map<std::string, std::string> declared =
      matches(source("/lib/kvq/runtime.h"), "typedef struct (kvq_\\w+) \\{\\s*size_t struct_size;");
  const std::map<std::string, std::string> sized =
      matches(source("/lib/kvq/runtime/api/struct_sizes.h"), "KVQ_FIRST_SIZE\\((kvq_\\w+), (\\d+)\\)");
  const std::map<std::string, std::string> tested =
      matches(source("/tests/unit/runtime/abi_test.cpp"), "KVQ_CHECK_SIZE\\((kvq_\\w+), (\\d+)\\)");
  CHECK(declared.size() == 27);
  CHECK(sized == tested);
  for (const auto& [name, nothing] : declared) {
    INFO(name);
    CHECK(sized.count(name) == 1);
  }
  for (const auto& [name, bytes] : sized) {
    INFO(name << ", " << bytes << " bytes");
    CHECK(declared.count(name) == 1);
  }
}

TEST_CASE("Numbers of statuses and faults are those that kernels and checks use", "[runtime]") {
  CHECK(static_cast<int>(KVQ_INTERNAL) == static_cast<int>(StatusCode::internal));
  CHECK(static_cast<int>(KVQ_CUDA) == static_cast<int>(StatusCode::cuda));
  const auto check = [](kvq_fault_code of_interface, FaultCode of_kernels) {
    CAPTURE(static_cast<int>(of_interface));
    CHECK(static_cast<std::int32_t>(of_interface) == static_cast<std::int32_t>(of_kernels));
  };
  check(KVQ_FAULT_NONE, FaultCode::none);
  check(KVQ_FAULT_LENGTH, FaultCode::length);
  check(KVQ_FAULT_PAGE, FaultCode::page);
  check(KVQ_FAULT_SINK_SLOT, FaultCode::sink_slot);
  check(KVQ_FAULT_RING_SLOT, FaultCode::ring_slot);
  check(KVQ_FAULT_FOREIGN_RING, FaultCode::foreign_ring);
  check(KVQ_FAULT_ROLLBACK, FaultCode::rollback);
  check(KVQ_FAULT_NEW_TOKENS, FaultCode::new_tokens);
  check(KVQ_FAULT_PREFIX, FaultCode::prefix);
  check(KVQ_FAULT_PLAN, FaultCode::plan);
  check(KVQ_FAULT_SLOT_MAPPING, FaultCode::slot_mapping);
  check(KVQ_FAULT_WINDOW_ROW, FaultCode::window_row);
  check(KVQ_FAULT_OUTPUT_ROWS, FaultCode::output_rows);
  CHECK_FALSE(Fault{});
  CHECK(Fault{FaultCode::length});
}

TEST_CASE("A caller of the first header is understood by a library whose structure has grown", "[runtime]") {
  FirstCaller caller;
  Known known;
  REQUIRE(abi::read_struct(caller.as_known(), known, "x").ok());
  CHECK(known.struct_size == sizeof(Known));
  CHECK(known.a == 7);
  CHECK((known.b == 0 && known.c == 0));

  const Known full{sizeof(Known), 1, 2, 3};
  REQUIRE(abi::write_struct(full, caller.as_known(), "x").ok());
  CHECK(caller.struct_size == offsetof(Known, b));
  CHECK(caller.a == 1);
  CHECK(caller.behind == 0x5A5A5A5A5A5A5A5A);

  for (const std::size_t size : {std::size_t{0}, std::size_t{8}, offsetof(Known, b) - 1}) {
    CAPTURE(size);
    caller = {.struct_size = size};
    const std::string expected = "x: struct_size is " + std::to_string(size) + ", expected 16 or more: use KVQ_INIT";
    for (const Status& status :
         {abi::read_struct(caller.as_known(), known, "x"), abi::write_struct(full, caller.as_known(), "x")}) {
      CHECK(status.code() == StatusCode::invalid_argument);
      CHECK(std::string(status.message()) == expected);
    }
    CHECK(caller.a == 7);
  }
}

TEST_CASE("A caller between the first header and this one gives the fields that it has", "[runtime]") {
  Known caller{offsetof(Known, c), 7, 8, 9}, known;
  REQUIRE(abi::read_struct(&caller, known, "x").ok());
  CHECK((known.a == 7 && known.b == 8 && known.c == 0));
  const Known full{sizeof(Known), 1, 2, 3};
  REQUIRE(abi::write_struct(full, &caller, "x").ok());
  CHECK((caller.struct_size == offsetof(Known, c) && caller.a == 1 && caller.b == 2 && caller.c == 9));
}

TEST_CASE("Structures of newer callers are taken if what is unknown is zero", "[runtime]") {
  Newer newer{{sizeof(Newer), 1, 2, 3}, 0};
  Known known;
  REQUIRE(abi::read_struct(&newer.known, known, "x").ok());
  CHECK(known.struct_size == sizeof(Known));
  CHECK(known.c == 3);
  newer.d = 1;
  const Status unknown = abi::read_struct(&newer.known, known, "x");
  CHECK(unknown.code() == StatusCode::unsupported);
  CHECK_THAT(unknown.message(), Contains("x: fields behind byte 24 are set"));
  newer.known.struct_size = std::size_t{1} << 40;
  CHECK(abi::read_struct(&newer.known, known, "x").code() == StatusCode::invalid_argument);
  CHECK_THAT(abi::read_struct<Known>(nullptr, known, "x").message(), Contains("x must not be null"));

  newer = {{sizeof(Newer), 0, 0, 0}, 5};
  REQUIRE(abi::write_struct(Known{sizeof(Known), 1, 2, 3}, &newer.known, "x").ok());
  CHECK(newer.known.struct_size == sizeof(Newer));
  CHECK(newer.known.c == 3);
  CHECK(newer.d == 5);
  CHECK_THAT(abi::write_struct<Known>(known, nullptr, "x").message(), Contains("x must not be null"));
}

TEST_CASE("Exceptions become statuses with their words, cut to the caller's room", "[runtime]") {
  kvq_error error = runtime::init<kvq_error>();
  CHECK(abi::guarded(&error, [] { throw Error{ErrorKind::check_failed, "other model"}; }) == KVQ_MISMATCH);
  CHECK(std::string(error.message) == "other model");
  CHECK(abi::guarded(&error, [] { throw std::bad_alloc(); }) == KVQ_INTERNAL);
  CHECK(std::string(error.message) == "no host memory");
  CHECK(abi::guarded(&error, [] { throw 7; }) == KVQ_INTERNAL);
  CHECK(abi::guarded(&error, [] {}) == KVQ_OK);
  CHECK(std::string(error.message).empty());
  CHECK(abi::guarded(nullptr, [] { throw Error{ErrorKind::io, "gone"}; }) == KVQ_IO);
  CHECK(abi::guarded(&error, [] { throw Error{ErrorKind::usage, std::string(5000, 'x')}; }) == KVQ_INVALID_ARGUMENT);
  CHECK(std::string(error.message).size() == sizeof error.message - 1);

  std::vector<char> small(offsetof(kvq_error, message) + 5, 'z');
  small.push_back('!');
  auto* cut = reinterpret_cast<kvq_error*>(small.data());
  cut->struct_size = small.size() - 1;
  CHECK(abi::guarded(cut, [] { throw Error{ErrorKind::io, "123456789"}; }) == KVQ_IO);
  CHECK(std::string(cut->message) == "1234");
  CHECK(small.back() == '!');
}

TEST_CASE("Version, words for statuses and names of kernels need no device", "[runtime]") {
  CHECK(kvq_version()->abi_version == KVQ_ABI_VERSION);
  CHECK(std::string(kvq_version()->text) == KVQ_VERSION);
  std::set<std::string> words;
  for (int code = 0; code <= KVQ_INTERNAL; ++code) CHECK(words.insert(kvq_status_string(code)).second);
  CHECK(std::string(kvq_status_string(99)) == "unknown status");
  words.clear();
  for (int code = 0; code <= KVQ_FAULT_OUTPUT_ROWS; ++code) CHECK(words.insert(kvq_fault_string(code)).second);
  CHECK(words.count("unknown fault") == 0);
  CHECK(std::string(kvq_fault_string(KVQ_FAULT_PAGE)) == "page");
  CHECK(std::string(kvq_fault_string(KVQ_FAULT_FOREIGN_RING)) == "foreign ring");
  for (const std::int32_t code : {-1, KVQ_FAULT_OUTPUT_ROWS + 1, 1 << 30})
    CHECK(std::string(kvq_fault_string(code)) == "unknown fault");
  for (const kvq_kernel kernel : {KVQ_KERNEL_DECODE, KVQ_KERNEL_WRITE, KVQ_KERNEL_DEQUANTIZE, KVQ_KERNEL_PREFILL}) {
    int count = 0;
    while (kvq_kernel_name(kernel, count)) ++count;
    CHECK(count >= 3);
    CHECK(kvq_kernel_name(kernel, -1) == nullptr);
  }
  CHECK(std::string(kvq_kernel_name(KVQ_KERNEL_DECODE, 0)) == "decode_d128_u2g128_u2g128_h4_bf16");
  for (const std::int32_t kernel : {-1, KVQ_KERNEL_PREFILL + 1, 9}) CHECK(kvq_kernel_name(kernel, 0) == nullptr);
}

TEST_CASE("Null is refused by name everywhere, and destroyed in silence", "[runtime]") {
  kvq_error error = runtime::init<kvq_error>();
  const auto refused = [&](kvq_status status, const char* name) {
    CAPTURE(name);
    CHECK(status == KVQ_INVALID_ARGUMENT);
    CHECK_THAT(error.message, Contains(std::string(name) + " must not be null"));
  };
  auto options = runtime::init<kvq_model_options>();
  kvq_model* model = nullptr;
  refused(kvq_model_load(nullptr, &options, &model, &error), "path");
  refused(kvq_model_load("x", nullptr, &model, &error), "options");
  refused(kvq_model_load("x", &options, nullptr, &error), "model");
  options.num_layers = options.num_geometries = 1;
  refused(kvq_model_load("x", &options, &model, &error), "geometry");
  refused(kvq_model_query(nullptr, nullptr, &error), "model");
  refused(kvq_model_query_layer(nullptr, 0, nullptr, &error), "model");
  std::size_t bytes = 0;
  refused(kvq_model_device_bytes(nullptr, &bytes, &error), "model");
  refused(kvq_model_upload(nullptr, nullptr, 0, nullptr, nullptr, &error), "model");
  refused(kvq_cache_device_bytes(nullptr, nullptr, &bytes, &error), "device_model");
  refused(kvq_cache_create(nullptr, nullptr, nullptr, 0, nullptr, 0, nullptr, nullptr, &error), "device_model");
  refused(kvq_step_run(nullptr, nullptr, nullptr, &error), "args");
  refused(kvq_fault_query(nullptr, nullptr, nullptr, &error), "cache");
  refused(kvq_copy_bytes(nullptr, KVQ_COPY_PAGES, &bytes, &error), "cache");
  refused(kvq_copy_run(nullptr, nullptr, nullptr, &error), "args");
  refused(kvq_memory_estimate(nullptr, nullptr, nullptr, &error), "model");
  kvq_plan* made = nullptr;
  refused(kvq_plan_create(nullptr, nullptr, &made, &error), "model");
  refused(kvq_plan_kernel(nullptr, 0, KVQ_KERNEL_WRITE, nullptr, &error), "plan");
  refused(kvq_plan_workspace_bytes(nullptr, KVQ_KERNEL_DECODE, &bytes, &error), "plan");
  refused(kvq_write_run(nullptr, nullptr, 0, nullptr, nullptr, &error), "plan");
  refused(kvq_decode_run(nullptr, nullptr, 0, nullptr, nullptr, &error), "plan");
  refused(kvq_append_run(nullptr, nullptr, 0, nullptr, nullptr, &error), "plan");
  refused(kvq_prefill_run(nullptr, nullptr, 0, nullptr, nullptr, &error), "plan");
  refused(kvq_dequantize_run(nullptr, nullptr, 0, nullptr, nullptr, &error), "plan");
  refused(kvq_selftest(nullptr, nullptr, 0, nullptr, nullptr, &error), "model");
  refused(kvq_fold_values(nullptr, 0, nullptr, nullptr, &error), "model");
  refused(kvq_fold_keys(nullptr, 0, nullptr, &error), "model");
  const kvq_plan plan{.kernels = {{}}, .of_layer = {0}};
  refused(kvq_plan_kernel(&plan, 0, KVQ_KERNEL_WRITE, nullptr, &error), "info");
  refused(kvq_plan_workspace_bytes(&plan, KVQ_KERNEL_DECODE, nullptr, &error), "bytes");
  refused(kvq_write_run(&plan, nullptr, 0, nullptr, nullptr, &error), "args");
  refused(kvq_decode_run(&plan, nullptr, 0, nullptr, nullptr, &error), "args");
  refused(kvq_prefill_run(&plan, nullptr, 0, nullptr, nullptr, &error), "args");
  refused(kvq_dequantize_run(&plan, nullptr, 0, nullptr, nullptr, &error), "args");
  auto write_args = runtime::init<kvq_write_args>();
  refused(kvq_write_run(&plan, nullptr, 0, &write_args, nullptr, &error), "cache");
  auto decode_args = runtime::init<kvq_decode_args>();
  refused(kvq_decode_run(&plan, nullptr, 0, &decode_args, nullptr, &error), "cache");
  refused(kvq_append_run(&plan, nullptr, 0, nullptr, nullptr, &error), "args");
  auto append_args = runtime::init<kvq_append_args>();
  refused(kvq_append_run(&plan, nullptr, 0, &append_args, nullptr, &error), "sequences");
  auto sequences = runtime::init<kvq_sequences>();
  append_args.sequences = &sequences;
  refused(kvq_append_run(&plan, nullptr, 0, &append_args, nullptr, &error), "cache");
  auto prefill_args = runtime::init<kvq_prefill_args>();
  refused(kvq_prefill_run(&plan, nullptr, 0, &prefill_args, nullptr, &error), "cache");
  auto dequantize_args = runtime::init<kvq_dequantize_args>();
  refused(kvq_dequantize_run(&plan, nullptr, 0, &dequantize_args, nullptr, &error), "cache");
  auto step_args = runtime::init<kvq_step_args>();
  refused(kvq_step_run(nullptr, &step_args, nullptr, &error), "cache");
  auto copy_args = runtime::init<kvq_copy_args>();
  refused(kvq_copy_run(nullptr, &copy_args, nullptr, &error), "cache");
  const kvq_cache cache;
  refused(kvq_copy_bytes(&cache, KVQ_COPY_PAGES, nullptr, &error), "bytes");
  kvq_model_destroy(nullptr), kvq_device_model_destroy(nullptr), kvq_cache_destroy(nullptr);
  kvq_plan_destroy(nullptr);
}

TEST_CASE("A plan tells kernels of its own layers alone, and of those kinds that it has", "[runtime]") {
  const kvq_plan plan{.first_layer = 3, .kernels = {{}}, .of_layer = {0, 0}};
  auto info = runtime::init<kvq_kernel_info>();
  kvq_error error = runtime::init<kvq_error>();
  const auto refused = [&](kvq_status status, const char* message) {
    CHECK(status == KVQ_INVALID_ARGUMENT);
    CHECK(std::string(error.message) == message);
  };
  CHECK(kvq_plan_kernel(&plan, 4, KVQ_KERNEL_WRITE, &info, &error) == KVQ_OK);
  CHECK(kvq_plan_kernel(&plan, 3, KVQ_KERNEL_DEQUANTIZE, &info, &error) == KVQ_OK);
  for (const std::int32_t layer : {2, 5, -1, 1 << 30})
    refused(kvq_plan_kernel(&plan, layer, KVQ_KERNEL_WRITE, &info, &error),
            ("plan: layer: expected 3 to 4, found " + std::to_string(layer)).c_str());
  refused(kvq_plan_kernel(&plan, 3, KVQ_KERNEL_DECODE, &info, &error),
          "plan: it has no decode kernels: max_batch is 0");
  refused(kvq_plan_kernel(&plan, 3, KVQ_KERNEL_PREFILL, &info, &error),
          "plan: it has no prefill kernels: max_prefill_batch is 0");
  std::size_t bytes = 5;
  for (const std::int32_t kernel : {-1, KVQ_KERNEL_PREFILL + 1}) {
    const std::string message = "plan: kernel: expected a kvq_kernel, found " + std::to_string(kernel);
    refused(kvq_plan_kernel(&plan, 3, kernel, &info, &error), message.c_str());
    refused(kvq_plan_workspace_bytes(&plan, kernel, &bytes, &error), message.c_str());
  }
  CHECK(bytes == 5);
  CHECK(kvq_plan_workspace_bytes(&plan, KVQ_KERNEL_WRITE, &bytes, &error) == KVQ_OK);
  CHECK(bytes == 0);
}

TEST_CASE("Sizes of plans that contradict each other are refused", "[runtime]") {
  const auto fault = [](auto change) {
    auto options = runtime::init<kvq_plan_options>();
    change(options);
    return std::string(abi::check_plan_options(options).message());
  };
  CHECK(fault([](auto&) {}).empty());
  CHECK(fault([](auto& o) { o.max_batch = 4; }).empty());
  CHECK(fault([](auto& o) { o.max_prefill_batch = o.max_prefill_queries = o.max_prefill_keys = 1; }).empty());
  CHECK(fault([](auto& o) { o.flags = 6; }) == "plan: flags: unknown bits in 0x6");
  CHECK(fault([](auto& o) { o.max_batch = -1; }) == "plan: max_batch: expected 0 or more, found -1");
  CHECK(fault([](auto& o) { o.max_prefill_batch = -2; }) == "plan: max_prefill_batch: expected 0 or more, found -2");
  CHECK_THAT(fault([](auto& o) { o.max_prefill_keys = 5; }), Contains("sizes of prefill without max_prefill_batch"));
  CHECK_THAT(fault([](auto& o) { o.prefill_workspace_bytes = 5; }), Contains("without max_prefill_batch"));
  CHECK_THAT(fault([](auto& o) { o.max_prefill_batch = 1, o.max_prefill_queries = 5, o.max_prefill_keys = 4; }),
             Contains("max_prefill_queries 5, max_prefill_keys 4: expected"));
  CHECK_THAT(fault([](auto& o) { o.max_prefill_batch = 1; }), Contains("max_prefill_queries 0"));
}

TEST_CASE("A kind of copies that does not exist is refused", "[runtime]") {
  const kvq_cache cache;
  std::size_t bytes = 5;
  for (const std::int32_t kind : {-1, 3, 1 << 30}) {
    CAPTURE(kind);
    kvq_error error = runtime::init<kvq_error>();
    const std::string expected = "copy: kind: expected a kvq_copy_kind, found " + std::to_string(kind);
    CHECK(kvq_copy_bytes(&cache, kind, &bytes, &error) == KVQ_INVALID_ARGUMENT);
    CHECK(std::string(error.message) == expected);
    auto args = runtime::init<kvq_copy_args>();
    args.kind = kind;
    CHECK(kvq_copy_run(&cache, &args, nullptr, &error) == KVQ_INVALID_ARGUMENT);
    CHECK(std::string(error.message) == expected);
  }
  CHECK(bytes == 5);
}
