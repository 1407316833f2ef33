# cuBLAS and cuSOLVER, for calibration on CUDA devices: the toolkit's, else those that scripts/setup.sh --with-cuda-libs
# installs into .venv. KVQ_HAVE_CUDA_LIBRARIES is the result, kvq::cuda_libraries links them.
set(KVQ_HAVE_CUDA_LIBRARIES OFF)
if(KVQ_HAVE_CUDA)
  file(GLOB folders ${PROJECT_SOURCE_DIR}/.venv/lib/python3*/site-packages/nvidia/cu${CUDAToolkit_VERSION_MAJOR})
  set(hints "")
  foreach(folder IN LISTS CUDAToolkit_ROOT CUDAToolkit_TARGET_DIR folders)
    list(APPEND hints ${folder})
  endforeach()
  find_path(KVQ_CUBLAS_INCLUDE cublas_v2.h HINTS ${hints} ${CUDAToolkit_INCLUDE_DIRS} PATH_SUFFIXES include)
  find_path(KVQ_CUSOLVER_INCLUDE cusolverDn.h HINTS ${hints} ${CUDAToolkit_INCLUDE_DIRS} PATH_SUFFIXES include)
  # The Python packages have the libraries under their full names alone.
  foreach(name IN ITEMS cublas cusolver)
    string(TOUPPER ${name} variable)
    find_library(
      KVQ_${variable}_LIBRARY
      NAMES ${name} lib${name}.so.13 lib${name}.so.12
      HINTS ${hints} ${CUDAToolkit_LIBRARY_DIR}
      PATH_SUFFIXES lib lib64
    )
  endforeach()
  if(KVQ_CUBLAS_INCLUDE AND KVQ_CUSOLVER_INCLUDE AND KVQ_CUBLAS_LIBRARY AND KVQ_CUSOLVER_LIBRARY)
    set(KVQ_HAVE_CUDA_LIBRARIES ON)
    add_library(kvq_cuda_libraries INTERFACE)
    add_library(kvq::cuda_libraries ALIAS kvq_cuda_libraries)
    target_include_directories(kvq_cuda_libraries SYSTEM INTERFACE ${KVQ_CUBLAS_INCLUDE} ${KVQ_CUSOLVER_INCLUDE})
    target_link_libraries(
      kvq_cuda_libraries
      INTERFACE ${KVQ_CUSOLVER_LIBRARY} ${KVQ_CUBLAS_LIBRARY} CUDA::cudart_static
    )
  endif()
endif()
message(STATUS "kvq: calibration on CUDA devices ${KVQ_HAVE_CUDA_LIBRARIES}")
