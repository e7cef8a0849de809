#pragma once

// Checkpoints: a folder with one directory for each saved step. docs/format.md describes the bytes, docs/faults.md what
// survives. What lies where, from the bytes up:
//
//   The format, without torch (library tesserae::checkpoint_format)
//     dtype.h          element types by their names in files
//     fault.h          where a checkpoint is damaged, and the error that says so
//     json_reader.h    strict JSON whose memory a schema bounds
//     names.h          which names tensors and files may have
//     safetensors.h    the header of a data file
//     checksum.h       XXH3 over blocks of a file
//     manifest.h       what a checkpoint contains: files, tensors, layout, training state
//     manifest_text.h  its text, with the checksum of itself
//   Files, without torch
//     folder.h         the checkpoints of a folder, found by scanning
//     crash_point.h    named places at which tests end a process
//     data_file.h      writing one rank's data file
//     writer.h         the commit protocol
//     block_reader.h   one data file against its checksums
//     reader.h         verified reading of tensors
//     verify.h         all checksums of a checkpoint
//   Training state, with torch (library tesserae::checkpoint)
//     state.h          pieces: this rank's part of each tensor of the training state
//     model_state.h    the pieces of a sharded model and its optimizer
//     random_state.h   the random numbers of a rank
//     snapshot.h       copies of pieces in host memory
//     saver.h          saving, in step with training or beside it
//     placement.h      where stored elements lie in a piece
//     load.h           filling pieces; choosing what to load, together
//     weights.h        whole weights in Hugging Face's files
//     weight_folder.h  writing such files
//     name_map.h       names of parameters in other people's files

#include "tesserae/checkpoint/folder.h"
#include "tesserae/checkpoint/load.h"
#include "tesserae/checkpoint/model_state.h"
#include "tesserae/checkpoint/random_state.h"
#include "tesserae/checkpoint/reader.h"
#include "tesserae/checkpoint/saver.h"
#include "tesserae/checkpoint/verify.h"
#include "tesserae/checkpoint/weights.h"
