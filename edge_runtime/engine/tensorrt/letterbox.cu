// A camera's picture into a place of a model's input: scaled, padded and converted, a thread for each pixel of the place.
//
// No header is included: NVRTC has none, and the tests compile this file for the CPU. Every pixel is a mean of the
// source's, weighted by a triangle of half-width `support` around its centre; beyond an edge the edge goes on. With a
// support of 1 that is plain bilinear; with that of the scale nothing aliases, which is what swscale's bilinear does.

enum { SOURCE_BGR24 = 0, SOURCE_RGBA = 1, SOURCE_YUV420 = 2 };
enum { PLACE_FLOAT32 = 0, PLACE_BGR24 = 1, PLACE_RGBA = 2 };

// The weighted mean of `channels` (at most 3) values at (x, y); `step` bytes lie between pixels of a row, `next` between
// the channels of a pixel.
__device__ static void gather(
    const unsigned char *plane, int pitch, int step, int next, int channels, int width, int height,
    float x, float y, float support_x, float support_y, float *mean)
{
    int first_x = (int)ceilf(x - support_x), last_x = (int)floorf(x + support_x);
    int first_y = (int)ceilf(y - support_y), last_y = (int)floorf(y + support_y);
    float total = 0.0f;
    for (int channel = 0; channel < channels; channel++)
        mean[channel] = 0.0f;
    for (int row = first_y; row <= last_y; row++) {
        float weight_y = 1.0f - fabsf((float)row - y) / support_y;
        int inside_y = row < 0 ? 0 : row >= height ? height - 1 : row;
        const unsigned char *line = plane + (size_t)inside_y * (size_t)pitch;
        for (int column = first_x; column <= last_x; column++) {
            float weight = weight_y * (1.0f - fabsf((float)column - x) / support_x);
            int inside_x = column < 0 ? 0 : column >= width ? width - 1 : column;
            const unsigned char *pixel = line + (size_t)inside_x * (size_t)step;
            total += weight;
            for (int channel = 0; channel < channels; channel++)
                mean[channel] += weight * (float)pixel[(size_t)channel * (size_t)next];
        }
    }
    for (int channel = 0; channel < channels; channel++)
        mean[channel] /= total;
}

__device__ static float level(float value)
{
    return value < 0.0f ? 0.0f : value > 255.0f ? 255.0f : value;
}

__device__ static unsigned char byte_of(float value)
{
    return (unsigned char)floorf(level(value) + 0.5f);
}

// `chroma`: where the colours of SOURCE_YUV420 begin, else not read: U, and V `chroma_next` bytes behind it (1: in turn,
// which is nv12; a plane: yuv420p), `chroma_step` bytes between samples. The first of them lies (chroma_x, chroma_y) px
// right of and below the first pixel. The whole source is scaled to resized_width x resized_height and its corner put at
// (left, top) of the place, which may be negative. Its red is luma * (Y - black) + red_v * (V - 128), and so on. A float32
// place is [3][h][w] of pixel * gain + offset, red first where `red_first`.
extern "C" __global__ void letterbox(
    const unsigned char *source, int pitch, const unsigned char *chroma, int chroma_pitch,
    int source_kind, int source_width, int source_height,
    unsigned char *place, int place_kind, int place_width, int place_height,
    int left, int top, int resized_width, int resized_height,
    float support_x, float support_y, float pad, int red_first,
    float gain_0, float gain_1, float gain_2, float offset_0, float offset_1, float offset_2,
    float black, float luma, float red_v, float green_u, float green_v, float blue_u,
    int chroma_step, int chroma_next, float chroma_x, float chroma_y)
{
    int column = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    int row = (int)(blockIdx.y * blockDim.y + threadIdx.y);
    if (column >= place_width || row >= place_height)
        return;
    float red = pad, green = pad, blue = pad;
    int in_x = column - left, in_y = row - top;
    if (in_x >= 0 && in_x < resized_width && in_y >= 0 && in_y < resized_height) {
        float x = ((float)in_x + 0.5f) * (float)source_width / (float)resized_width - 0.5f;
        float y = ((float)in_y + 0.5f) * (float)source_height / (float)resized_height - 0.5f;
        float found[3];
        if (source_kind == SOURCE_YUV420) {
            float colour[3];
            float half_x = support_x * 0.5f, half_y = support_y * 0.5f;
            gather(source, pitch, 1, 1, 1, source_width, source_height, x, y, support_x, support_y, found);
            gather(chroma, chroma_pitch, chroma_step, chroma_next, 2, (source_width + 1) / 2, (source_height + 1) / 2,
                   (x - chroma_x) * 0.5f, (y - chroma_y) * 0.5f, half_x < 1.0f ? 1.0f : half_x, half_y < 1.0f ? 1.0f : half_y, colour);
            float bright = luma * (found[0] - black), u = colour[0] - 128.0f, v = colour[1] - 128.0f;
            red = level(bright + red_v * v);
            green = level(bright + green_u * u + green_v * v);
            blue = level(bright + blue_u * u);
        } else {
            gather(source, pitch, source_kind == SOURCE_RGBA ? 4 : 3, 1, 3, source_width, source_height,
                   x, y, support_x, support_y, found);
            red = source_kind == SOURCE_RGBA ? found[0] : found[2];
            green = found[1];
            blue = source_kind == SOURCE_RGBA ? found[2] : found[0];
        }
    }
    size_t area = (size_t)place_width * (size_t)place_height;
    size_t index = (size_t)row * (size_t)place_width + (size_t)column;
    if (place_kind == PLACE_FLOAT32) {
        float *planes = (float *)place;
        planes[index] = (red_first ? red : blue) * gain_0 + offset_0;
        planes[area + index] = green * gain_1 + offset_1;
        planes[2 * area + index] = (red_first ? blue : red) * gain_2 + offset_2;
    } else if (place_kind == PLACE_RGBA) {
        place[4 * index] = byte_of(red);
        place[4 * index + 1] = byte_of(green);
        place[4 * index + 2] = byte_of(blue);
        place[4 * index + 3] = 255;
    } else {
        place[3 * index] = byte_of(blue);
        place[3 * index + 1] = byte_of(green);
        place[3 * index + 2] = byte_of(red);
    }
}
