// The operations as functions of the Python module: what torch's dispatcher leads to, without the
// way there, which takes 6 µs of a call for its schema, its boxes and its keys.
// flash_attn/dispatch/direct.py says which calls may. Tensors become handles and handles tensors by
// the functions that torch has for programs of AOTInductor.
#pragma once

#include <Python.h>
#include <torch/csrc/stable/library.h>

#include <tuple>
#include <utility>
#include <vector>

#include "api/tensors.h"

namespace flash::api {

// torch.Tensor or torch.nn.Parameter, and no class derived from them.
bool is_plain_tensor(PyObject* x);

// The tensors among a call's arguments, in their order.
class TensorArguments {
 public:
  // If that fails, a Python error is set and there are none.
  TensorArguments(PyObject* const* args, Py_ssize_t count);

  // Whether a kernel can have them: the first is on a GPU, and all have memory, which those of
  // torch's transforms have not, nor zeros that are none before somebody reads them. One on another
  // device is the operation's to refuse.
  bool for_kernels() const;

  Tensor next() { return std::move(tensors_[next_++]); }

 private:
  std::vector<Tensor> tensors_;
  size_t next_ = 0;
};

// How an argument of a type is read. `takes` is false for what only torch converts, such as numpy's
// numbers and symbols.
template <class T>
struct Argument;

template <>
struct Argument<Tensor> {
  static bool takes(PyObject* x) { return is_plain_tensor(x); }
  static Tensor read(PyObject*, TensorArguments& tensors) { return tensors.next(); }
};

template <>
struct Argument<OptionalTensor> {
  static bool takes(PyObject* x) { return x == Py_None || is_plain_tensor(x); }
  static OptionalTensor read(PyObject* x, TensorArguments& tensors) {
    return x == Py_None ? OptionalTensor() : tensors.next();
  }
};

template <>
struct Argument<bool> {
  static bool takes(PyObject* x) { return PyBool_Check(x); }
  static bool read(PyObject* x, TensorArguments&) { return x == Py_True; }
};

template <>
struct Argument<int64_t> {
  static bool takes(PyObject* x) { return PyLong_CheckExact(x); }
  static int64_t read(PyObject* x, TensorArguments&) { return PyLong_AsLongLong(x); }
};

template <>
struct Argument<double> {
  static bool takes(PyObject* x) { return PyFloat_Check(x) || PyLong_CheckExact(x); }
  static double read(PyObject* x, TensorArguments&) { return PyFloat_AsDouble(x); }
};

// Other threads run on while this one talks to the GPU, which may have it wait.
class WithoutInterpreter {
 public:
  WithoutInterpreter() : state_(PyEval_SaveThread()) {}
  ~WithoutInterpreter() { PyEval_RestoreThread(state_); }
  WithoutInterpreter(WithoutInterpreter const&) = delete;

 private:
  PyThreadState* state_;
};

// A list of the tensors, None for those that are null; itself null with a Python error set.
PyObject* to_python(std::initializer_list<Tensor const*> tensors);

inline Tensor const* if_any(Tensor const& tensor) { return &tensor; }
inline Tensor const* if_any(OptionalTensor const& tensor) { return tensor ? &*tensor : nullptr; }

// The C++ exception that is being handled, as torch would translate it.
PyObject* raise_current_exception();

template <auto kFunction, class = decltype(kFunction)>
struct Direct;

template <auto kFunction, class Result, class... Parameters>
struct Direct<kFunction, Result (*)(Parameters...)> {
  // All arguments by position. NotImplemented: the dispatcher may serve them, this does not.
  static PyObject* call(PyObject*, PyObject* const* args, Py_ssize_t count) {
    return call(args, count, std::index_sequence_for<Parameters...>{});
  }

 private:
  template <size_t... I>
  static PyObject* call(PyObject* const* args, Py_ssize_t count, std::index_sequence<I...>) {
    if (count != sizeof...(Parameters) || !(Argument<Parameters>::takes(args[I]) && ...)) {
      return Py_NewRef(Py_NotImplemented);
    }
    try {
      TensorArguments tensors(args, count);
      if (PyErr_Occurred()) {
        return nullptr;
      }
      if (!tensors.for_kernels()) {
        return Py_NewRef(Py_NotImplemented);
      }
      // Braces: from left to right, as the tensors come.
      std::tuple<Parameters...> values{Argument<Parameters>::read(args[I], tensors)...};
      return PyErr_Occurred() ? nullptr : results(run(values));
    } catch (...) {
      return raise_current_exception();
    }
  }

  static auto run(std::tuple<Parameters...>& values) {
    WithoutInterpreter const without;
    if constexpr (std::is_void_v<Result>) {
      std::apply(kFunction, values);
      return std::tuple<>();
    } else {
      return std::apply(kFunction, values);
    }
  }

  static PyObject* results(std::tuple<> const&) { return Py_NewRef(Py_None); }

  static PyObject* results(Tensor const& tensor) {
    PyObject* const list = to_python({&tensor});
    PyObject* const only = list ? Py_NewRef(PyList_GetItem(list, 0)) : nullptr;
    Py_XDECREF(list);
    return only;
  }

  template <class... T>
  static PyObject* results(std::tuple<T...> const& tensors) {
    return std::apply([](auto const&... t) { return to_python({if_any(t)...}); }, tensors);
  }
};

using DirectCall = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

// Makes it a function of the module, called like the operation.
void add_direct(char const* name, DirectCall call);

// Puts the functions, and `use_torch`, which they need first, into a module; false with a Python
// error set. It is called once.
bool add_direct_functions(PyObject* module);

// The operation for tensors on a GPU, directly and by the dispatcher.
template <auto kFunction, auto kBoxed = kFunction>
void serve(torch::stable::detail::StableLibrary& library, char const* name) {
  library.impl(name, TORCH_BOX(kBoxed));
  add_direct(name, &Direct<kFunction>::call);
}

}  // namespace flash::api
