// SPDX-License-Identifier: Apache-2.0
using System.Reflection;
using System.Runtime.CompilerServices;

[assembly: AssemblyTitle("GradAccum")]
[assembly: AssemblyDescription("Gradient accumulation and optimizer steps for programs that compute their own gradients")]
[assembly: InternalsVisibleTo("GradAccumTests")]
