package kernel

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// TxChecksumOffload reports whether a device of the calling thread's network namespace
// leaves checksums of outgoing packets to the device below ("ethtool -k":
// tx-checksumming).
func TxChecksumOffload(device string) (bool, error) {
	const getTxCsum = 0x16 // ETHTOOL_GTXCSUM, include/uapi/linux/ethtool.h
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false, fmt.Errorf("read checksum offload of %s: %w", device, err)
	}
	defer unix.Close(fd)
	value := struct{ cmd, data uint32 }{cmd: getTxCsum}
	req := struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte // struct ifreq is 40 bytes long
	}{data: unsafe.Pointer(&value)}
	copy(req.name[:unix.IFNAMSIZ-1], device)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&req))); errno != 0 {
		return false, fmt.Errorf("read checksum offload of %s: %w", device, errno)
	}
	return value.data != 0, nil
}
