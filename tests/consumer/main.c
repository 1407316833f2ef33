/* What an engine in C sees of kvq on a machine without a device. */
#include <kvq/runtime.h>

#include <stdio.h>

int main(void) {
  const kvq_version_info* version = kvq_version();
  kvq_model_options options;
  kvq_error error;
  kvq_model* model = NULL;
  kvq_status status;
  if (version->abi_version != KVQ_ABI_VERSION) {
    printf("library %d, header %d\n", (int)version->abi_version, KVQ_ABI_VERSION);
    return 1;
  }
  KVQ_INIT(options);
  KVQ_INIT(error);
  status = kvq_model_load("no such file", &options, &model, &error);
  if (status != KVQ_INVALID_ARGUMENT || strstr(error.message, "num_layers") == NULL) {
    printf("%s: %s\n", kvq_status_string(status), error.message);
    return 1;
  }
  status = kvq_fold_keys(NULL, 0, NULL, &error);
  if (status != KVQ_INVALID_ARGUMENT || strstr(error.message, "model") == NULL) {
    printf("%s: %s\n", kvq_status_string(status), error.message);
    return 1;
  }
  printf("kvq %s, first kernel %s\n", version->text, kvq_kernel_name(KVQ_KERNEL_DECODE, 0));
  return 0;
}
