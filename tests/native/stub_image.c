// Reads what a driver knows of a cubin: architecture, entry functions, their parameters and bounds.
//
// cuModuleLoadData is told no size, so every offset is a claim. The bytes are copied out with
// process_vm_readv, which answers EFAULT where a pointer would crash: a damaged image is
// CUDA_ERROR_INVALID_IMAGE, whatever it says of itself.
#include "stub_driver.h"

#include <elf.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

enum { kMachineCuda = 190, kMaxImage = 256 << 20, kEntryFlag = 0x10 };
enum { kOsAbi7 = 0x33, kOsAbi8 = 0x41 };  // ptxas up to 12.9; 13.x, and sm_100 and up from 12.8

enum {  // attributes of .nv.info; each has a format byte before and a u16 after it
  kFormatSized = 4,
  kInfoMaxThreads = 0x05,
  kInfoRequiredThreads = 0x10,
  kInfoFrameSize = 0x11,
  kInfoParam = 0x17,
  kInfoRegisters = 0x2f,
  kInfoApiVersion = 0x37,
  kInfoCtaPerCluster = 0x3d,
};

// Shared memory that the driver keeps for itself appears in .nv.shared.<entry> from sm_90 on; it is
// no part of the 227 KB that a block may ask for.
enum { kReservedShared = 1024, kMaxShared = 1 << 20 };

typedef struct {
  const unsigned char* bytes;
  size_t size;
  const Elf64_Shdr* sections;
  int num_sections;
  const char* names;
  size_t names_size;
} Elf;

static bool read_memory(const void* from, void* to, size_t size) {
  struct iovec local = {to, size};
  struct iovec remote = {(void*)from, size};
  ssize_t got = process_vm_readv(getpid(), &local, 1, &remote, 1, 0);
  if (got < 0 && (errno == EPERM || errno == ENOSYS)) {  // a sandbox: trust the pointer
    memcpy(to, from, size);
    return true;
  }
  return got == (ssize_t)size;
}

static bool is_cuda_elf(const Elf64_Ehdr* header) {
  return memcmp(header->e_ident, ELFMAG, SELFMAG) == 0 && header->e_ident[EI_CLASS] == ELFCLASS64 &&
         header->e_machine == kMachineCuda && header->e_shentsize == sizeof(Elf64_Shdr) &&
         header->e_shnum != 0 && header->e_shstrndx < header->e_shnum &&
         (header->e_ident[EI_OSABI] == kOsAbi7 || header->e_ident[EI_OSABI] == kOsAbi8);
}

// Copies the whole image; its end is the farthest end of anything that its headers name.
static unsigned char* copy_image(const void* image, size_t* size) {
  Elf64_Ehdr header;
  // The magic first: an image of four bytes is garbage, but no fault.
  if (!read_memory(image, &header, SELFMAG) || memcmp(&header, ELFMAG, SELFMAG) != 0) return NULL;
  if (!read_memory(image, &header, sizeof header) || !is_cuda_elf(&header)) return NULL;
  size_t table = (size_t)header.e_shnum * sizeof(Elf64_Shdr);
  if (header.e_shoff > kMaxImage || header.e_shoff % 8 != 0) return NULL;
  Elf64_Shdr* sections = malloc(table);
  size_t end = header.e_shoff + table;
  bool good = read_memory((const char*)image + header.e_shoff, sections, table);
  for (int i = 0; good && i < header.e_shnum; i++) {
    if (sections[i].sh_type == SHT_NOBITS || sections[i].sh_type == SHT_NULL) continue;
    if (sections[i].sh_offset > kMaxImage || sections[i].sh_size > kMaxImage)
      good = false;
    else if (sections[i].sh_offset + sections[i].sh_size > end)
      end = sections[i].sh_offset + sections[i].sh_size;
  }
  free(sections);
  size_t programs = header.e_phoff + (size_t)header.e_phnum * header.e_phentsize;
  if (header.e_phoff > kMaxImage || programs > kMaxImage) return NULL;
  if (programs > end) end = programs;
  if (!good || end > kMaxImage) return NULL;
  unsigned char* copy = malloc(end);
  if (copy == NULL || !read_memory(image, copy, end)) {
    free(copy);
    return NULL;
  }
  *size = end;
  return copy;
}

static const char* section_name(const Elf* elf, const Elf64_Shdr* section) {
  return section->sh_name < elf->names_size ? elf->names + section->sh_name : "";
}

static const Elf64_Shdr* find_section(const Elf* elf, const char* prefix, const char* name) {
  size_t length = strlen(prefix);
  for (int i = 0; i < elf->num_sections; i++) {
    const char* found = section_name(elf, &elf->sections[i]);
    if (strncmp(found, prefix, length) == 0 && strcmp(found + length, name) == 0)
      return &elf->sections[i];
  }
  return NULL;
}

// NULL if the file holds none of it. What it holds was measured by copy_image.
static const unsigned char* contents(const Elf* elf, const Elf64_Shdr* section) {
  if (section == NULL) return NULL;
  bool is_empty = section->sh_type == SHT_NOBITS || section->sh_type == SHT_NULL;
  return is_empty ? NULL : elf->bytes + section->sh_offset;
}

static uint32_t read_u32(const unsigned char* p) {
  uint32_t value;
  memcpy(&value, p, sizeof value);
  return value;
}

// Calls `take` for every sized attribute of an info section.
static bool for_each_info(const Elf* elf, const Elf64_Shdr* section,
                          void (*take)(void*, int, const unsigned char*, unsigned), void* to) {
  if (section == NULL) return true;
  const unsigned char* p = contents(elf, section);
  if (p == NULL) return false;
  const unsigned char* end = p + section->sh_size;
  while (end - p >= 4) {
    int format = p[0], attribute = p[1];
    unsigned size = (unsigned)(p[2] | p[3] << 8);
    p += 4;
    if (format != kFormatSized) continue;
    if (size > (size_t)(end - p)) return false;
    take(to, attribute, p, size);
    p += size;
  }
  return true;
}

static void take_entry_info(void* to, int attribute, const unsigned char* data, unsigned size) {
  Entry* entry = to;
  if (attribute == kInfoParam && size >= 12) {
    uint32_t position = read_u32(data + 4);
    uint32_t ordinal = position & 0xffff;
    if ((int)ordinal >= entry->num_params) {
      entry->params = realloc(entry->params, (ordinal + 1) * sizeof(Param));
      memset(entry->params + entry->num_params, 0,
             (ordinal + 1 - (uint32_t)entry->num_params) * sizeof(Param));
      entry->num_params = (int)ordinal + 1;
    }
    Param param = {position >> 16, read_u32(data + 8) >> 18 & 0x3fff};
    entry->params[ordinal] = param;
    if (param.offset + param.size > entry->params_size)
      entry->params_size = param.offset + param.size;
  } else if (attribute == kInfoRequiredThreads && size >= 12) {
    memcpy(entry->required_threads, data, 12);
  } else if (attribute == kInfoCtaPerCluster && size >= 12) {
    memcpy(entry->required_cluster, data, 12);
  } else if (attribute == kInfoMaxThreads && size >= 12) {
    entry->max_threads = read_u32(data) * read_u32(data + 4) * read_u32(data + 8);
  }
}

static void take_api_version(void* to, int attribute, const unsigned char* data, unsigned size) {
  if (attribute == kInfoApiVersion && size >= 4) *(int*)to = (int)read_u32(data);
}

typedef struct {
  Image* image;
  const int* entry_of_symbol;  // entry + 1, 0 if the symbol is not an entry
  size_t num_symbols;
} SymbolInfo;

static void take_symbol_info(void* to, int attribute, const unsigned char* data, unsigned size) {
  SymbolInfo* info = to;
  if (size < 8) return;
  uint32_t symbol = read_u32(data);
  if (symbol >= info->num_symbols || info->entry_of_symbol[symbol] == 0) return;
  Entry* entry = &info->image->entries[info->entry_of_symbol[symbol] - 1];
  if (attribute == kInfoRegisters) entry->registers = (int)read_u32(data + 4);
  if (attribute == kInfoFrameSize) entry->local_size = (int)read_u32(data + 4);
}

static bool read_entries(const Elf* elf, Image* image) {
  const Elf64_Shdr* table = find_section(elf, ".symtab", "");
  const unsigned char* symbols = contents(elf, table);
  if (symbols == NULL || table->sh_link >= (unsigned)elf->num_sections) return false;
  const Elf64_Shdr* strings = &elf->sections[table->sh_link];
  const char* names = (const char*)contents(elf, strings);
  if (names == NULL || strings->sh_size == 0 || names[strings->sh_size - 1] != 0) return false;
  size_t count = table->sh_size / sizeof(Elf64_Sym);
  int* entry_of_symbol = calloc(count + 1, sizeof(int));
  bool good = true;
  for (size_t i = 0; good && i < count; i++) {
    Elf64_Sym symbol;
    memcpy(&symbol, symbols + i * sizeof symbol, sizeof symbol);
    if (ELF64_ST_TYPE(symbol.st_info) != STT_FUNC || !(symbol.st_other & kEntryFlag)) continue;
    if (symbol.st_name >= strings->sh_size) {
      good = false;
      break;
    }
    Entry entry = {.registers = 32};
    entry.name = strdup(names + symbol.st_name);
    good = for_each_info(elf, find_section(elf, ".nv.info.", entry.name), take_entry_info, &entry);
    const Elf64_Shdr* shared = find_section(elf, ".nv.shared.", entry.name);
    if (shared != NULL && shared->sh_size > kMaxShared) good = false;
    entry.static_shared = shared != NULL ? (int)(shared->sh_size & (kMaxShared - 1)) : 0;
    if (image->arch >= 90 && entry.static_shared >= kReservedShared)
      entry.static_shared -= kReservedShared;
    for_each_info(elf, find_section(elf, ".nv.info.", entry.name), take_api_version,
                  &image->toolkit);
    image->entries = realloc(image->entries, (size_t)(image->num_entries + 1) * sizeof(Entry));
    image->entries[image->num_entries++] = entry;
    entry_of_symbol[i] = image->num_entries;
  }
  SymbolInfo info = {image, entry_of_symbol, count};
  good = good && for_each_info(elf, find_section(elf, ".nv.info", ""), take_symbol_info, &info);
  free(entry_of_symbol);
  return good;
}

// "sm_90a" in the command line that ptxas 13 leaves in a note; its e_flags no longer say it.
static char variant_in_note(const Elf* elf) {
  const Elf64_Shdr* note = find_section(elf, ".note.nv.tkinfo", "");
  const char* text = (const char*)contents(elf, note);
  if (text == NULL) return 0;
  const char* found = memmem(text, note->sh_size, "sm_", 3);
  if (found == NULL) return 0;
  const char* end = text + note->sh_size;
  for (found += 3; found < end && *found >= '0' && *found <= '9';) found++;
  return found < end && (*found == 'a' || *found == 'f') ? *found : 0;
}

static void read_arch(const Elf* elf, const Elf64_Ehdr* header, Image* image) {
  if (header->e_ident[EI_OSABI] == kOsAbi7) {
    image->arch = header->e_flags & 0xff;
    image->arch_variant = header->e_flags & 0x800 ? 'a' : 0;
    return;
  }
  image->arch = header->e_flags >> 8 & 0xff;
  image->arch_variant = header->e_flags & 0x8 ? 'a' : variant_in_note(elf);
}

Result stub_parse_image(const void* bytes, Image* image) {
  memset(image, 0, sizeof *image);
  if (bytes == NULL) return kInvalidValue;
  Elf elf = {0};
  unsigned char* copy = copy_image(bytes, &elf.size);
  if (copy == NULL) return kInvalidImage;
  const Elf64_Ehdr* header = (const Elf64_Ehdr*)copy;
  elf.bytes = copy;
  elf.sections = (const Elf64_Shdr*)(copy + header->e_shoff);
  elf.num_sections = header->e_shnum;
  const Elf64_Shdr* names = &elf.sections[header->e_shstrndx];
  elf.names = (const char*)contents(&elf, names);
  bool good = elf.names != NULL && names->sh_size > 0 && elf.names[names->sh_size - 1] == 0;
  if (good) {
    elf.names_size = names->sh_size;
    read_arch(&elf, header, image);
    good = read_entries(&elf, image);
  }
  uint64_t digest = 0xcbf29ce484222325u;
  for (size_t i = 0; i < elf.size; i++) digest = (digest ^ copy[i]) * 0x100000001b3u;
  image->digest = digest;
  free(copy);
  if (good) return kSuccess;
  stub_free_image(image);
  return kInvalidImage;
}

void stub_free_image(Image* image) {
  for (int i = 0; i < image->num_entries; i++) {
    free(image->entries[i].name);
    free(image->entries[i].params);
  }
  free(image->entries);
  memset(image, 0, sizeof *image);
}

// A cubin runs on its own major version from its own minor version on; with `a` only on exactly its
// own architecture.
bool stub_image_runs_on(const Image* image, int device_arch) {
  if (image->arch_variant == 'a') return image->arch == device_arch;
  return image->arch / 10 == device_arch / 10 && image->arch <= device_arch;
}
