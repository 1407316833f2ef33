include(KvqKernelTable)

# kvq_kernel_rows(<variants.json> <out variable>) writes the tuned kernels of variants.json as plain data into the build
# folder (kvq/plan/kernel_rows.h), for builds with and without CUDA, and returns the source's name. The file is written
# only if its text changes.
function(kvq_kernel_rows table out)
  kvq_kernel_table(${table} kernels)
  set(rows "")
  foreach(kernel ${kernels})
    kvq_kernel_fields("${kernel}")
    string(
      APPEND rows
      "      {KernelVerb::${verb}, ${head_dim}, \"${k}\", \"${v}\", ${heads}, \"${activation}\", KernelSet::${set}},\n"
    )
  endforeach()
  set(file ${CMAKE_CURRENT_BINARY_DIR}/kernel_rows.cpp)
  file(
    CONFIGURE
    OUTPUT ${file}
    CONTENT
      "#include <kvq/plan/kernel_rows.h>

namespace kvq {
std::span<const KernelRow> kernel_rows() {
  static constexpr KernelRow table[] = {
${rows}  };
  return table;
}
}
"
  )
  set(${out} ${file} PARENT_SCOPE)
endfunction()
