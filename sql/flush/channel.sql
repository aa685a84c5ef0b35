SELECT tuskline.request_channel();
