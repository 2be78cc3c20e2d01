// The operations as functions for Python (api/direct.h), as the library's module has them.
#include "api/direct.h"

extern "C" __attribute__((visibility("default"))) PyObject* direct_functions() {
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "direct", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  PyObject* const module = PyModule_Create(&definition);
  if (module && !flash::api::add_direct_functions(module)) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
