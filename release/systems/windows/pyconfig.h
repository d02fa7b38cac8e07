/* SPDX-License-Identifier: Apache-2.0
 *
 * What Python's headers ask about Windows on x86-64, for what uses the stable ABI alone. Python's own file of this name
 * is for Microsoft's compiler. */
#pragma once

#define MS_WINDOWS
#define MS_WIN32
#define MS_WIN64
#define Py_ENABLE_SHARED 1 /* functions are in a DLL */
#define HAVE_DECLSPEC_DLL
#define SIZEOF_SHORT 2
#define SIZEOF_INT 4
#define SIZEOF_LONG 4
#define SIZEOF_LONG_LONG 8
#define SIZEOF_SIZE_T 8
#define SIZEOF_VOID_P 8
#define SIZEOF_WCHAR_T 2
#define SIZEOF_TIME_T 8
#define SIZEOF_FLOAT 4
#define SIZEOF_DOUBLE 8
#define ALIGNOF_MAX_ALIGN_T 16
#define HAVE_STDARG_PROTOTYPES 1
#define WITH_THREAD 1
