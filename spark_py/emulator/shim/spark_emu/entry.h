// SPDX-License-Identifier: AGPL-3.0-only
// How the runtime enters a file's kernels. The build appends one SPARK_EMU_MODULE to the file, with the kernels' names.
#pragma once

namespace spark_emu {

template <class T>
constexpr EmuParam describe() {
    constexpr uint32_t kind = std::is_pointer<T>::value                                  ? EMU_POINTER
                              : std::is_floating_point<T>::value                         ? EMU_FLOAT
                              : std::is_enum<T>::value || std::is_unsigned<T>::value     ? EMU_UNSIGNED
                              : std::is_integral<T>::value                               ? EMU_SIGNED
                                                                                         : EMU_BYTES;
    return EmuParam{kind, sizeof(T), alignof(T)};
}

template <auto KERNEL>
struct Entry;

template <class... Args, void (*KERNEL)(Args...)>
struct Entry<KERNEL> {
    static constexpr EmuParam params[sizeof...(Args) + 1] = {describe<Args>()..., EmuParam{}};

    template <size_t... I>
    __attribute__((no_sanitize("thread", "alignment"))) static void spread(const unsigned char* args,
                                                                           const uint32_t* offsets,
                                                                           std::integer_sequence<size_t, I...>) {
        KERNEL(*reinterpret_cast<const Args*>(args + offsets[I])...);
    }
    __attribute__((no_sanitize("thread", "alignment"))) static void call(const unsigned char* args,
                                                                         const uint32_t* offsets) {
        spread(args, offsets, std::make_integer_sequence<size_t, sizeof...(Args)>());
    }
    static constexpr EmuKernel kernel(const char* name) {
        return EmuKernel{name, static_cast<uint32_t>(sizeof...(Args)), params, &call};
    }
};

static thread_local unsigned char anchor_byte;
static unsigned char* anchor() { return &anchor_byte; }

}  // namespace spark_emu

// The dynamic part of shared memory: every `extern __shared__` name of a file is a label of the same bytes.
#define SPARK_EMU_LABEL(name) ".hidden " #name "\n.globl " #name "\n.type " #name ", %tls_object\n" #name ":\n"
#define SPARK_EMU_DYNAMIC(labels)                                                                      \
    asm(".pushsection .tbss.spark_emu_dynamic, \"awT\", %nobits\n.p2align 7\n" labels                   \
        SPARK_EMU_LABEL(spark_emu_dynamic) ".zero 232448\n.popsection\n");                             \
    extern "C" __attribute__((visibility("hidden"))) thread_local unsigned char spark_emu_dynamic[];   \
    static unsigned char* spark_emu_dynamic_start() { return spark_emu_dynamic; }
#define SPARK_EMU_NO_DYNAMIC() \
    static unsigned char* spark_emu_dynamic_start() { return nullptr; }
#define SPARK_EMU_KERNEL(name) spark_emu::Entry<&name>::kernel(#name),
#define SPARK_EMU_MODULE(kernels)                                                                                   \
    static const EmuKernel spark_emu_kernels[] = {kernels EmuKernel{}};                                             \
    extern "C" SPARK_EMU_VISIBLE const EmuModule spark_emu_module = {                                               \
        SPARK_EMU_ABI, SPARK_EMU_IS_CHECKED, spark_emu::anchor, spark_emu_dynamic_start, spark_emu_kernels,         \
        sizeof(spark_emu_kernels) / sizeof(EmuKernel) - 1};
