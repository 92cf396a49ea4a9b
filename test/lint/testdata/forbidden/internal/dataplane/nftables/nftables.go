package nftables
