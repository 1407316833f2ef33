# Third-party packages, all from the distribution. One message lists the missing packages and how to install them.
find_package(fmt 9 QUIET)
find_package(Eigen3 3.4 QUIET NO_MODULE)
find_package(nlohmann_json 3.11 QUIET)
find_package(CLI11 2.1 QUIET)
find_package(TBB 2021 QUIET)
find_package(HDF5 1.10 QUIET COMPONENTS C)
find_path(KVQ_VALIJSON_INCLUDE valijson/validator.hpp)
find_path(KVQ_XXHASH_INCLUDE xxhash.h)
find_library(KVQ_OPENBLAS openblas)
find_path(KVQ_OPENBLAS_INCLUDE cblas.h PATH_SUFFIXES x86_64-linux-gnu aarch64-linux-gnu openblas)

set(missing "")
foreach(
  pair
  IN
  ITEMS
    "fmt_FOUND|libfmt-dev"
    "Eigen3_FOUND|libeigen3-dev"
    "nlohmann_json_FOUND|nlohmann-json3-dev"
    "CLI11_FOUND|libcli11-dev"
    "TBB_FOUND|libtbb-dev"
    "HDF5_FOUND|libhdf5-dev"
    "KVQ_VALIJSON_INCLUDE|libvalijson-dev"
    "KVQ_XXHASH_INCLUDE|libxxhash-dev"
    "KVQ_OPENBLAS|libopenblas-dev"
    "KVQ_OPENBLAS_INCLUDE|libopenblas-dev"
)
  string(REPLACE "|" ";" pair "${pair}")
  list(GET pair 0 variable)
  list(GET pair 1 package)
  if(NOT ${variable})
    list(APPEND missing ${package})
  endif()
endforeach()
if(missing)
  list(REMOVE_DUPLICATES missing)
  list(JOIN missing " " missing)
  message(FATAL_ERROR "kvq: missing packages: ${missing}\nRun scripts/setup.sh, or: apt-get install ${missing}")
endif()

add_library(kvq_hdf5 INTERFACE)
target_include_directories(kvq_hdf5 SYSTEM INTERFACE ${HDF5_C_INCLUDE_DIRS})
target_link_libraries(kvq_hdf5 INTERFACE ${HDF5_C_LIBRARIES})
add_library(kvq_openblas INTERFACE)
target_include_directories(kvq_openblas SYSTEM INTERFACE ${KVQ_OPENBLAS_INCLUDE})
target_link_libraries(kvq_openblas INTERFACE ${KVQ_OPENBLAS})
add_library(kvq_valijson INTERFACE)
target_include_directories(kvq_valijson SYSTEM INTERFACE ${KVQ_VALIJSON_INCLUDE})
add_library(kvq_xxhash INTERFACE)
target_include_directories(kvq_xxhash SYSTEM INTERFACE ${KVQ_XXHASH_INCLUDE})
target_compile_definitions(kvq_xxhash INTERFACE XXH_INLINE_ALL)
