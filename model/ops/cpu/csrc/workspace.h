// One grow-only scratch buffer per thread. Knows nothing of what is kept in it.
#pragma once
#include <cstdlib>

struct Workspace {
    void* data = nullptr;
    size_t size = 0;

    ~Workspace() { free(data); }

    template <class T>
    T* get(size_t count) {
        size_t wanted = (count * sizeof(T) + 4095) / 4096 * 4096;
        if (wanted > size) {
            free(data);
            data = aligned_alloc(64, wanted);
            if (!data) abort();
            size = wanted;
        }
        return static_cast<T*>(data);
    }
};
