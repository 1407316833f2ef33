#include <kvq/runtime/api/abi.h>
#include <kvq/runtime/api/handles.h>
#include <kvq/runtime.hpp>

#include "support/served_artifact.h"
#include "support/temp_folder.h"

#include <catch2/catch.hpp>

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

using namespace kvq;
using Catch::Matchers::Contains;

namespace {

/// A structure of this library, and the same structure of a newer header.
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

TEST_CASE("Structures of the interface have the sizes that callers were compiled with", "[runtime]") {
  // Changing a size breaks callers. Append fields instead, and keep these lines, which are the sizes of version 1.0.
  CHECK(sizeof(kvq_error) == 1032);
  CHECK(sizeof(kvq_layer_geometry) == 48);
  CHECK(sizeof(kvq_model_options) == 64);
  CHECK(sizeof(kvq_layer_pools) == 32);
  CHECK(sizeof(kvq_step_args) == 96);
  CHECK(sizeof(kvq_write_args) == 64);
  CHECK(sizeof(kvq_decode_args) == 120);
  CHECK(sizeof(kvq_selftest_layer) == 320);
  CHECK(sizeof(kvq_fold_values_args) == 48);
  CHECK(sizeof(kvq_fold_error) == 40);
  CHECK(sizeof(kvq_fold_keys_args) == 48);
  CHECK(sizeof(kvq_fold_key_scales_args) == 64);
  CHECK(offsetof(kvq_layer_info, k_scales) == 128);
  CHECK(offsetof(kvq_decode_args, workspace) == 104);
  CHECK(static_cast<int>(KVQ_INTERNAL) == static_cast<int>(StatusCode::internal));
  CHECK(static_cast<int>(KVQ_CUDA) == static_cast<int>(StatusCode::cuda));
}

TEST_CASE("Older structures are completed with zeros, newer ones taken if what is unknown is zero", "[runtime]") {
  Newer newer{{sizeof(Newer), 1, 2, 3}, 0};
  Known known;
  REQUIRE(abi::read_struct(&newer.known, known, "x").ok());
  CHECK(known.struct_size == sizeof(Known));
  CHECK(known.c == 3);
  newer.d = 1;
  const Status unknown = abi::read_struct(&newer.known, known, "x");
  CHECK(unknown.code() == StatusCode::unsupported);
  CHECK_THAT(unknown.message(), Contains("x: fields behind byte 24 are set"));

  Known older{offsetof(Known, b), 7, 8, 9};
  REQUIRE(abi::read_struct(&older, known, "x", offsetof(Known, b)).ok());
  CHECK(known.a == 7);
  CHECK(known.b == 0);
  CHECK_THAT(abi::read_struct(&older, known, "x").message(), Contains("struct_size is 16, expected 24 or more"));
  older.struct_size = 0;
  CHECK(abi::read_struct(&older, known, "x", offsetof(Known, b)).code() == StatusCode::invalid_argument);
  older.struct_size = std::size_t{1} << 40;
  CHECK(abi::read_struct(&older, known, "x").code() == StatusCode::invalid_argument);
  CHECK_THAT(abi::read_struct<Known>(nullptr, known, "x").message(), Contains("x must not be null"));
}

TEST_CASE("Results go as far as the caller's structure does", "[runtime]") {
  const Known full{sizeof(Known), 1, 2, 3};
  Newer newer{{sizeof(Newer), 0, 0, 0}, 5};
  REQUIRE(abi::write_struct(full, &newer.known, "x").ok());
  CHECK(newer.known.struct_size == sizeof(Newer));
  CHECK(newer.known.c == 3);
  CHECK(newer.d == 5);
  Known older{offsetof(Known, b), 0, 8, 9};
  REQUIRE(abi::write_struct(full, &older, "x", offsetof(Known, b)).ok());
  CHECK(older.a == 1);
  CHECK(older.b == 8);
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
  for (const kvq_kernel kernel :
       {KVQ_KERNEL_DECODE, KVQ_KERNEL_WRITE, KVQ_KERNEL_DEMOTE, KVQ_KERNEL_DEQUANTIZE, KVQ_KERNEL_PREFILL}) {
    int count = 0;
    while (kvq_kernel_name(kernel, count)) ++count;
    CHECK(count >= 4);
    CHECK(kvq_kernel_name(kernel, -1) == nullptr);
  }
  CHECK(std::string(kvq_kernel_name(KVQ_KERNEL_DECODE, 0)) == "decode_d128_u2g128_u2g128_h4_bf16");
  CHECK(kvq_kernel_name(9, 0) == nullptr);
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
  refused(kvq_cache_device_bytes(nullptr, &bytes, &error), "device_model");
  refused(kvq_cache_create(nullptr, nullptr, 0, nullptr, 0, nullptr, nullptr, &error), "device_model");
  refused(kvq_step_plan_create(nullptr, nullptr, nullptr, &error), "device_model");
  refused(kvq_step_workspace_bytes(nullptr, &bytes, &error), "plan");
  refused(kvq_step_run(nullptr, nullptr, nullptr, nullptr, &error), "plan");
  refused(kvq_write_plan_create(nullptr, 0, nullptr, &error), "model");
  refused(kvq_write_run(nullptr, nullptr, 0, nullptr, nullptr, &error), "plan");
  refused(kvq_write_plan_kernel(nullptr, nullptr, &error), "plan");
  refused(kvq_decode_plan_kernel(nullptr, nullptr, &error), "plan");
  refused(kvq_prefill_plan_kernel(nullptr, nullptr, &error), "plan");
  refused(kvq_dequantize_plan_kernel(nullptr, nullptr, &error), "plan");
  refused(kvq_cache_demote_kernel(nullptr, 0, nullptr, &error), "cache");
  refused(kvq_decode_plan_create(nullptr, 0, nullptr, nullptr, &error), "model");
  refused(kvq_decode_workspace_bytes(nullptr, &bytes, &error), "plan");
  refused(kvq_decode_run(nullptr, nullptr, 0, nullptr, nullptr, &error), "plan");
  std::size_t more = 0;
  refused(kvq_prefill_plan_create(nullptr, 0, nullptr, nullptr, &error), "model");
  refused(kvq_prefill_workspace_bytes(nullptr, &more, &error), "plan");
  refused(kvq_prefill_run(nullptr, nullptr, 0, nullptr, nullptr, &error), "plan");
  refused(kvq_dequantize_plan_create(nullptr, 0, nullptr, &error), "model");
  refused(kvq_dequantize_run(nullptr, nullptr, 0, nullptr, nullptr, &error), "plan");
  refused(kvq_selftest(nullptr, nullptr, 0, nullptr, nullptr, &error), "model");
  refused(kvq_fold_values(nullptr, 0, nullptr, nullptr, &error), "model");
  refused(kvq_fold_keys(nullptr, 0, nullptr, &error), "model");
  const kvq_write_plan write;
  refused(kvq_write_run(&write, nullptr, 0, nullptr, nullptr, &error), "args");
  refused(kvq_write_plan_kernel(&write, nullptr, &error), "info");
  auto args = runtime::init<kvq_write_args>();
  refused(kvq_write_run(&write, nullptr, 0, &args, nullptr, &error), "cache");
  const kvq_decode_plan decode;
  auto decode_args = runtime::init<kvq_decode_args>();
  refused(kvq_decode_run(&decode, nullptr, 0, &decode_args, nullptr, &error), "cache");
  const kvq_step_plan step;
  auto step_args = runtime::init<kvq_step_args>();
  refused(kvq_step_run(&step, nullptr, &step_args, nullptr, &error), "cache");
  kvq_model_destroy(nullptr), kvq_device_model_destroy(nullptr), kvq_cache_destroy(nullptr);
  kvq_step_plan_destroy(nullptr), kvq_write_plan_destroy(nullptr), kvq_decode_plan_destroy(nullptr);
  kvq_prefill_plan_destroy(nullptr), kvq_dequantize_plan_destroy(nullptr);
}
