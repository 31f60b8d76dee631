// Owns what tch lacks: inference mode, flushing of denormals, the CUDA backend and its memory.
#include "shim.h"

#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/InferenceMode.h>
#include <dlfcn.h>

namespace {

thread_local std::string last_error;

}  // namespace

void dh::set_error(const char* what) { last_error = what; }

extern "C" {

const char* dh_error() { return last_error.c_str(); }

void* dh_inference_mode_new() { return new c10::InferenceMode(true); }

void dh_inference_mode_free(void* guard) { delete static_cast<c10::InferenceMode*>(guard); }

int dh_set_flush_denormal(int on) { return at::globalContext().setFlushDenormal(on != 0) ? 1 : 0; }

int dh_load_cuda(const char* library) {
  if (dlopen(library, RTLD_NOW | RTLD_GLOBAL)) return 0;
  dh::set_error(dlerror());
  return 1;
}

// Free bytes of the current CUDA device, or -1.
int64_t dh_free_device_memory() {
  int64_t bytes = -1;
  dh::guarded([&] {
    auto* allocator = c10::getDeviceAllocator(c10::kCUDA);
    bytes = static_cast<int64_t>(allocator->getMemoryInfo(0).first);
  });
  return bytes;
}

}  // extern "C"
