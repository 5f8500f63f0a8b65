/* Writes a JPEG file with libjpeg, with the given components, sampling factors and scans. See make_jpegs.py.
 *
 *   encode WIDTH HEIGHT COLOURS SAMPLING SCANS RESTART KIND <PIXELS >FILE
 *
 * COLOURS: grey ycc rgb cmyk ycck. SAMPLING: "2x2,1x1,1x1". SCANS: "-", or "0,1,2:0-63:0:0;..." (components, band, and the
 * successive approximation's high and low bits). RESTART: MCUs between markers, or 0. KIND: b baseline, p progressive, a arithmetic. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <jpeglib.h>

int main(int argc, char **argv) {
    struct jpeg_compress_struct c;
    struct jpeg_error_mgr errors;
    jpeg_scan_info scans[64];
    if (argc != 8) return 2;
    int width = atoi(argv[1]), height = atoi(argv[2]), count = 0;
    const char *colours = argv[3], *factors;
    int channels = !strcmp(colours, "grey") ? 1 : strlen(colours) == 3 ? 3 : 4;
    c.err = jpeg_std_error(&errors);
    jpeg_create_compress(&c);
    jpeg_stdio_dest(&c, stdout);
    c.image_width = width;
    c.image_height = height;
    c.input_components = channels;
    c.in_color_space = channels == 1 ? JCS_GRAYSCALE : channels == 3 ? JCS_RGB : JCS_CMYK;
    jpeg_set_defaults(&c);
    jpeg_set_colorspace(&c, !strcmp(colours, "grey") ? JCS_GRAYSCALE : !strcmp(colours, "ycc") ? JCS_YCbCr
        : !strcmp(colours, "rgb") ? JCS_RGB : !strcmp(colours, "cmyk") ? JCS_CMYK : JCS_YCCK);
    jpeg_set_quality(&c, 50, TRUE);
    c.optimize_coding = argv[7][0] != 'a';
    c.restart_interval = atoi(argv[6]);
    factors = argv[4];
    for (int i = 0; i < channels; i++, factors += 4) {
        c.comp_info[i].h_samp_factor = factors[0] - '0';
        c.comp_info[i].v_samp_factor = factors[2] - '0';
    }
    if (argv[5][0] != '-') {
        memset(scans, 0, sizeof scans);
        for (char *scan = strtok(argv[5], ";"); scan; scan = strtok(NULL, ";"), count++) {
            jpeg_scan_info *s = &scans[count];
            for (; *scan != ':'; scan++)
                if (*scan != ',') s->component_index[s->comps_in_scan++] = *scan - '0';
            if (sscanf(scan, ":%d-%d:%d:%d", &s->Ss, &s->Se, &s->Ah, &s->Al) != 4) return 2;
        }
        c.scan_info = scans;
        c.num_scans = count;
    } else if (argv[7][0] == 'p') {
        jpeg_simple_progression(&c);
    }
    c.arith_code = argv[7][0] == 'a';
    jpeg_start_compress(&c, TRUE);
    unsigned char *row = malloc((size_t)width * channels);
    while (c.next_scanline < c.image_height) {
        if (fread(row, channels, width, stdin) != (size_t)width) return 3;
        jpeg_write_scanlines(&c, &row, 1);
    }
    jpeg_finish_compress(&c);
    return 0;
}
