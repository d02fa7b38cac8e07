// SPDX-License-Identifier: Apache-2.0
// The files of ranks with parameters of their own (GA_SHARD_PARAMETERS) that are saved at one path: an index there, and
// beside it a file of each rank, "PATH.3.rank0". The index is a state file without tensors that names the others, with
// what the header of each has as its checksum and which parts it has.
//
// The number in their names is another than in the index before, so a save that does not come to its end leaves what was
// there. The files of the index before are removed when the new one is in place.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "checkpoint/assembled_file.hpp"
#include "files/disk.hpp"
#include "model/own_parts.hpp"
#include "model/ranks.hpp"

namespace ga {

// In a call that all ranks make with this path. save(file) writes what this rank has, before commit(). ready: as in
// Ranks::on_all_ranks().
void save_rank_files(Ranks& ranks, const OwnParts& own, const char* path, const char* note,
                     const Ranks::Ready& ready, const std::function<void(FileWriter&)>& save);

// Opens a file of that name beside another one; size becomes that of it.
using OpenBeside = std::function<ReadAt(const std::string& name, int64_t& size)>;

inline bool is_index(const StateReader& file) { return file.find("files") != nullptr; }
// Opens what an index names. Throws GA_ERROR_FORMAT if a file is not the one that was saved with the index.
std::vector<AssembledFile::Source> open_rank_files(const StateReader& index,
                                                   const OpenBeside& open);

// Reads a file; size becomes that of it.
ReadAt reading_of(const std::string& path, int64_t& size);
// Opens files beside that one.
OpenBeside beside(const std::string& path);

}  // namespace ga
