#include "api/direct.h"

#include <stdexcept>

namespace flash::api {
namespace {

// torch's classes and functions in Python, set once by use_torch and kept for ever.
struct Torch {
  PyObject* tensor;  // classes
  PyObject* parameter;
  PyObject* to_handles;  // a list of tensors -> a list of capsules, each with a handle of its own
  PyObject* to_tensors;  // the inverse, which consumes the handles
} torch_{};

PyObject* use_torch(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 4) {
    PyErr_SetString(PyExc_TypeError, "Tensor, Parameter, to_handles and to_tensors are needed");
    return nullptr;
  }
  torch_ = {Py_NewRef(args[0]), Py_NewRef(args[1]), Py_NewRef(args[2]), Py_NewRef(args[3])};
  return Py_NewRef(Py_None);
}

PyMethodDef method(char const* name, DirectCall call, char const* doc) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call)), METH_FASTCALL, doc};
}

// All functions of the module. Operations add themselves while the library is loaded.
std::vector<PyMethodDef>& methods() {
  static std::vector<PyMethodDef> all{
      method("use_torch", use_torch,
             "(Tensor, Parameter, to_handles, to_tensors): sets torch's classes and functions that "
             "the operations need.")};
  return all;
}

PyObject* plain_tensors(PyObject* const* args, Py_ssize_t count) {
  PyObject* const list = PyList_New(0);
  for (Py_ssize_t i = 0; list && i < count; ++i) {
    if (is_plain_tensor(args[i])) {
      PyList_Append(list, args[i]);
    }
  }
  return list;
}

// The function's result, or null with a Python error set. Consumes the argument, which may be null.
PyObject* call_and_drop(PyObject* function, PyObject* argument) {
  PyObject* const result =
      argument ? PyObject_CallFunctionObjArgs(function, argument, nullptr) : nullptr;
  Py_XDECREF(argument);
  return result;
}

// A capsule with a new handle of the tensor. None stands for no tensor, also for to_tensors.
PyObject* capsule(Tensor const* tensor) {
  if (!tensor) {
    return Py_NewRef(Py_None);
  }
  AtenTensorHandle handle = nullptr;
  STD_TORCH_CHECK(aoti_torch_new_tensor_handle(tensor->get(), &handle) == AOTI_TORCH_SUCCESS,
                  "no handle for a result");
  return PyCapsule_New(handle, nullptr, nullptr);
}

}  // namespace

bool is_plain_tensor(PyObject* x) {
  auto const* const type = reinterpret_cast<PyObject*>(Py_TYPE(x));
  return type == torch_.tensor || type == torch_.parameter;
}

TensorArguments::TensorArguments(PyObject* const* args, Py_ssize_t count) {
  PyObject* const capsules = call_and_drop(torch_.to_handles, plain_tensors(args, count));
  Py_ssize_t const size = capsules ? PyList_Size(capsules) : 0;
  tensors_.reserve(static_cast<size_t>(size));
  for (Py_ssize_t i = 0; i < size; ++i) {
    void* const handle = PyCapsule_GetPointer(PyList_GetItem(capsules, i), nullptr);
    tensors_.emplace_back(static_cast<AtenTensorHandle>(handle));
  }
  Py_XDECREF(capsules);
}

bool TensorArguments::for_kernels() const {
  for (Tensor const& tensor : tensors_) {
    void* memory = nullptr;
    bool const told = aoti_torch_get_data_ptr(tensor.get(), &memory) == AOTI_TORCH_SUCCESS;
    if (!told || (!memory && tensor.is_cuda() && tensor.numel() > 0)) {
      return false;
    }
  }
  return !tensors_.empty() && tensors_.front().is_cuda();
}

PyObject* to_python(std::initializer_list<Tensor const*> tensors) {
  PyObject* const capsules = PyList_New(static_cast<Py_ssize_t>(tensors.size()));
  Py_ssize_t i = 0;
  for (Tensor const* tensor : tensors) {
    PyList_SetItem(capsules, i++, capsule(tensor));
  }
  return call_and_drop(torch_.to_tensors, capsules);
}

PyObject* raise_current_exception() {
  try {
    throw;
  } catch (std::invalid_argument const& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (std::exception const& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

void add_direct(char const* name, DirectCall call) {
  methods().push_back(method(name, call, "The operation. All arguments are positional."));
}

bool add_direct_functions(PyObject* module) {
  methods().push_back({});  // ends the list
  return PyModule_AddFunctions(module, methods().data()) == 0;
}

}  // namespace flash::api
