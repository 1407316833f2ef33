/*
 * A serving engine in small, in C: one sequence, its prompt in one prefill chunk, then decode steps.
 *
 *     example-engine-c ARTIFACT.safetensors
 *
 * Random numbers stand for the model's queries, keys and values: the token at position t has row t of them, in every
 * layer. The first enum stands for the model's configuration, because kvq_model_load() refuses an artifact of another
 * model.
 */
#include <cuda_runtime_api.h>
#include <kvq/runtime.h>
#include <stdio.h>
#include <stdlib.h>

enum { LAYERS = 6, Q_HEADS = 8, KV_HEADS = 2, DIM = 128 }; /* sample_data/model */
enum { PAGE = 64, PROMPT = 600, STEPS = 64, TOKENS = PROMPT + STEPS, PAGES = (TOKENS + PAGE - 1) / PAGE };

static kvq_error error; /* every call of kvq writes it */
static void* allocated[3 * LAYERS + 10];
static int num_allocated;

/* A fault ends the program. */
static void require(int holds, const char* message) {
  if (holds) return;
  fprintf(stderr, "example-engine-c: error: %s\n", message);
  exit(1);
}
static void check(kvq_status status) { require(status == KVQ_OK, error.message); }
static void check_cuda(cudaError_t status) { require(status == cudaSuccess, cudaGetErrorString(status)); }

/* Device memory, 256-byte aligned; null for no bytes. main() frees it. */
static void* take(size_t bytes) {
  void* memory = NULL;
  if (bytes > 0) check_cuda(cudaMalloc(&memory, bytes));
  return allocated[num_allocated++] = memory;
}

/* TOKENS rows of bfloat16 numbers in [-1, 1]. */
static uint16_t* take_random_rows(size_t row_length) {
  const size_t count = TOKENS * row_length;
  uint16_t *host = malloc(2 * count), *device = take(2 * count);
  require(host != NULL, "no host memory");
  for (size_t i = 0; i < count; ++i) {
    const float x = 2.0f * (float)rand() / (float)RAND_MAX - 1.0f;
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    host[i] = (uint16_t)(bits >> 16);
  }
  check_cuda(cudaMemcpy(device, host, 2 * count, cudaMemcpyHostToDevice));
  free(host);
  return device;
}

int main(int argc, char** argv) {
  int devices = 0;
  if (argc != 2) return fputs("usage: example-engine-c ARTIFACT.safetensors\n", stderr), 2;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0)
    return puts("example-engine-c: no CUDA device here: skipped"), 77;
  KVQ_INIT(error);
  cudaStream_t stream;
  check_cuda(cudaStreamCreate(&stream));

  /* The artifact, the self-test on its golden rows, and its rotations in device memory. */
  kvq_layer_geometry geometry;
  kvq_model_options options;
  kvq_model_info info;
  kvq_model* model;
  kvq_device_model* device_model;
  size_t bytes;
  KVQ_INIT(geometry), KVQ_INIT(options), KVQ_INIT(info);
  geometry.num_q_heads = Q_HEADS, geometry.num_kv_heads = KV_HEADS, geometry.head_dim = DIM;
  options.num_layers = LAYERS, options.num_geometries = 1, options.geometry = &geometry, options.page_size = PAGE;
  check(kvq_model_load(argv[1], &options, &model, &error));
  check(kvq_model_query(model, &info, &error));
  check(kvq_selftest(model, NULL, 0, NULL, stream, &error));
  check(kvq_model_device_bytes(model, &bytes, &error));
  check(kvq_model_upload(model, take(bytes), bytes, stream, &device_model, &error));

  /* The paged cache: in each layer all pages, one sink slot and one ring slot. Slots are for the exact windows; if the
   * artifact has none, the pools are empty. */
  kvq_cache_options extents;
  kvq_layer_pools pools[LAYERS];
  kvq_cache* cache;
  KVQ_INIT(extents);
  extents.num_pages = PAGES;
  extents.num_sink_slots = info.sink_tokens > 0, extents.num_ring_slots = info.recent_tokens > 0;
  for (int layer = 0; layer < LAYERS; ++layer) {
    kvq_layer_info sizes;
    KVQ_INIT(sizes), KVQ_INIT(pools[layer]);
    check(kvq_model_query_layer(model, layer, &sizes, &error));
    pools[layer].pages = take(PAGES * (size_t)sizes.page_bytes);
    pools[layer].sinks = take((size_t)sizes.sink_slot_bytes);
    pools[layer].rings = take((size_t)sizes.ring_slot_bytes);
  }
  check(kvq_cache_device_bytes(device_model, &extents, &bytes, &error));
  check(kvq_cache_create(device_model, &extents, pools, LAYERS, take(bytes), bytes, stream, &cache, &error));

  /* One plan serves all layers and calls. The workspace serves both kinds of attention, because the calls follow each
   * other on one stream. */
  kvq_plan_options calls;
  kvq_plan* plan;
  size_t workspace_bytes;
  KVQ_INIT(calls);
  calls.max_batch = calls.max_prefill_batch = 1;
  calls.max_prefill_queries = calls.max_prefill_keys = PROMPT;
  check(kvq_plan_create(model, &calls, &plan, &error));
  check(kvq_plan_workspace_bytes(plan, KVQ_KERNEL_PREFILL, &workspace_bytes, &error));
  check(kvq_plan_workspace_bytes(plan, KVQ_KERNEL_DECODE, &bytes, &error));
  if (bytes > workspace_bytes) workspace_bytes = bytes;
  void* workspace = take(workspace_bytes);

  /* What a step reads: the sequence's number, lengths, slots and block table, in the same order on host and device. The
   * sequence has its pages in descending order, because pages need not be neighbors. */
  struct {
    uint64_t id;
    int32_t seq_len, prefix_len, token_indptr[2], sink_slot, ring_slot, page_table[PAGES];
  } tables = {.id = 1}, *on_device = take(sizeof tables);
  for (int i = 0; i < PAGES; ++i) tables.page_table[i] = PAGES - 1 - i;
  uint16_t *q = take_random_rows(Q_HEADS * DIM), *out = take(2 * PROMPT * Q_HEADS * DIM);
  uint16_t *k = take_random_rows(KV_HEADS * DIM), *v = take_random_rows(KV_HEADS * DIM);

  /* One description of the sequences serves all calls. exact_from stays null, because the sequence begins empty. */
  kvq_sequences sequences;
  KVQ_INIT(sequences);
  sequences.batch = 1;
  sequences.seq_lens = &on_device->seq_len;
  sequences.page_table = on_device->page_table, sequences.page_table_stride = PAGES;
  if (info.sink_tokens > 0) sequences.sink_slots = &on_device->sink_slot;
  if (info.recent_tokens > 0) sequences.ring_slots = &on_device->ring_slot;
  sequences.sequence_ids = &on_device->id;

  kvq_step_args step;
  kvq_write_args write;
  kvq_prefill_args prefill;
  kvq_append_args append;
  KVQ_INIT(step), KVQ_INIT(write), KVQ_INIT(prefill), KVQ_INIT(append);
  step.sequences = prefill.sequences = append.sequences = &sequences;
  step.token_indptr = prefill.q_indptr = on_device->token_indptr;
  prefill.prefix_lens = &on_device->prefix_len;
  append.slot_mapping = write.slot_mapping = step.slot_mapping = take(PROMPT * sizeof(int64_t));
  if (sequences.sink_slots || sequences.ring_slots)
    append.window_mapping = write.window_mapping = step.window_mapping = take(PROMPT * sizeof(int64_t));
  prefill.out = append.out = out;
  prefill.workspace = append.workspace = workspace;
  prefill.workspace_bytes = append.workspace_bytes = workspace_bytes;

  /* The first step takes the prompt, each later one a token. */
  for (int before = 0, count = PROMPT; before < TOKENS; before += count, count = 1) {
    tables.seq_len = before + count, tables.prefix_len = before, tables.token_indptr[1] = count;
    check_cuda(cudaMemcpyAsync(on_device, &tables, sizeof tables, cudaMemcpyHostToDevice, stream));
    step.num_tokens = write.num_tokens = prefill.num_tokens = count;
    prefill.q = append.q = q + before * Q_HEADS * DIM;
    prefill.k = append.k = write.k = k + before * KV_HEADS * DIM;
    prefill.v = append.v = write.v = v + before * KV_HEADS * DIM;
    check(kvq_step_run(cache, &step, stream, &error));
    for (int layer = 0; layer < LAYERS; ++layer) {
      /* Here an engine computes q, k and v of the layer. After attention it goes on with `out`. */
      if (before == 0) {
        check(kvq_write_run(plan, cache, layer, &write, stream, &error));
        check(kvq_prefill_run(plan, cache, layer, &prefill, stream, &error));
      } else {
        check(kvq_append_run(plan, cache, layer, &append, stream, &error));
      }
    }
    check_cuda(cudaStreamSynchronize(stream)); /* an engine waits here for the token that it samples */
  }

  /* What the device alone can see, such as a page beyond the pool. An engine asks now and then. */
  kvq_fault fault;
  char message[128];
  KVQ_INIT(fault);
  check(kvq_fault_query(cache, &fault, stream, &error));
  snprintf(message, sizeof message, "fault: %s, sequence %d, layer %d, value %lld", kvq_fault_string(fault.code),
           fault.sequence, fault.layer, (long long)fault.value);
  require(fault.code == KVQ_FAULT_NONE, message);

  uint16_t row[DIM];
  check_cuda(cudaMemcpy(row, out, sizeof row, cudaMemcpyDeviceToHost));
  for (int i = 0; i < DIM; ++i) /* larger bits are larger magnitudes, infinity or NaN */
    require((row[i] & 0x7FFF) <= 0x3F80, "a mean of values in [-1, 1] lies outside");
  printf("served %d tokens of prompt in one chunk, then %d decode steps\n", PROMPT, STEPS);

  kvq_plan_destroy(plan);
  kvq_cache_destroy(cache);
  kvq_device_model_destroy(device_model);
  kvq_model_destroy(model);
  while (num_allocated > 0) check_cuda(cudaFree(allocated[--num_allocated]));
  check_cuda(cudaStreamDestroy(stream));
  return 0;
}
