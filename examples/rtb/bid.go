// Package rtb is a real-time-bidding exchange and its bidders, small enough to
// read and busy enough to show what a Service costs: a request of 3 KB comes
// in, is decoded, goes out to every bidder, and must be answered in 80 ms.
//
//	publisher ── POST /bid ── exchange ─┬─ POST /bid ── DSP
//	                                    ├─ POST /bid ── DSP
//	         DSP ── POST /register ─────┘
//
// The fields are those of OpenRTB 2.5 that the exchange looks at; the rest of a
// request is decoded and passed on with it.
package rtb

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
)

// Budget is how long bidders have for their bids.
const Budget = 80 * time.Millisecond

// maxBody bounds what is read of a request or of a bid, in bytes.
const maxBody = 64 << 10

// Request is a bid request.
type Request struct {
	ID   string       `json:"id"`
	Imp  []Impression `json:"imp"`
	Site Site         `json:"site"`
	Dev  Device       `json:"device"`
	User User         `json:"user"`
	TMax int          `json:"tmax"` // ms
	Cur  []string     `json:"cur"`
	BCat []string     `json:"bcat"`
	BAdv []string     `json:"badv"`
}

// Impression is one place for an advertisement.
type Impression struct {
	ID       string  `json:"id"`
	Banner   Banner  `json:"banner"`
	TagID    string  `json:"tagid"`
	BidFloor float64 `json:"bidfloor"` // for a thousand
}

// Banner says what fits.
type Banner struct {
	W     int      `json:"w"`
	H     int      `json:"h"`
	BType []int    `json:"btype"`
	MIMEs []string `json:"mimes"`
}

// Site is where the advertisement will be seen.
type Site struct {
	ID       string   `json:"id"`
	Domain   string   `json:"domain"`
	Page     string   `json:"page"`
	Cat      []string `json:"cat"`
	Keywords string   `json:"keywords"`
}

// Device is what it will be seen on.
type Device struct {
	UA       string `json:"ua"`
	IP       string `json:"ip"`
	OS       string `json:"os"`
	Language string `json:"language"`
}

// User is the person that sees the ad.
type User struct {
	ID       string `json:"id"`
	Keywords string `json:"keywords"`
}

// Bid is a bidder's answer.
type Bid struct {
	ID    string  `json:"id"`
	ImpID string  `json:"impid"`
	Price float64 `json:"price"` // for a thousand
	AdM   string  `json:"adm"`
}

var errNoImpression = errors.New("a bid request without an impression")

// Decode reads a bid request.
func Decode(body []byte) (*Request, error) {
	var r Request
	if err := json.Unmarshal(body, &r); err != nil {
		return nil, fmt.Errorf("decode bid request: %w", err)
	}
	if r.ID == "" || len(r.Imp) == 0 {
		return nil, errNoImpression
	}
	return &r, nil
}

// Sample is a bid request of about 3 KB.
func Sample() []byte {
	words := strings.Repeat("sport news travel weather finance ", 34)
	r := Request{ID: "80ce30c53c16e6ede735f123ef6e32361bfc7b22", TMax: 80, Cur: []string{"EUR"},
		BCat: []string{"IAB25", "IAB7-39", "IAB8-18", "IAB8-5", "IAB9-9"},
		BAdv: []string{"example.com", "example.net", "example.org"},
		Imp: []Impression{{ID: "1", TagID: "top-of-page", BidFloor: 0.03,
			Banner: Banner{W: 300, H: 250, BType: []int{1, 3}, MIMEs: []string{"image/png", "image/gif", "text/html"}}}},
		Site: Site{ID: "102855", Domain: "www.example.test", Page: "https://www.example.test/a/page/that/is/read.html",
			Cat: []string{"IAB3-1", "IAB12"}, Keywords: words},
		Dev: Device{UA: "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/120.0 Safari/537.36",
			IP: "192.0.2.1", OS: "Linux", Language: "en"},
		User: User{ID: "55816b39711f9b5acf3b90e313ed29e51665623f", Keywords: words},
	}
	body, err := json.Marshal(r)
	if err != nil {
		panic(err) // no field can fail
	}
	return body
}
