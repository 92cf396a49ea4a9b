// Package files moves files through Services with real programs: TFTP and FTP
// servers in pods, and clients outside, in pods and on nodes. What arrives is
// compared by hash. The package holds tests only.
package files
